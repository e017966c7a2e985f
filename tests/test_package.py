"""What is published: wheel and sdist; and the packaged model."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import compatibility
import hf_specdec
import release

ROOT = Path(__file__).parents[1]
USED = """
import sys
sys.path.insert(0, sys.argv[1])
import hf_specdec, importlib.metadata
assert hf_specdec.__file__.startswith(sys.argv[1]), hf_specdec.__file__
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=256)
model = hf_specdec.SpeculativeGenerationMixin.attach(LlamaForCausalLM(config).eval())
ids = torch.tensor([[5, 6, 7] * 4])
plain, drafted = (model.generate(ids, max_new_tokens=20, do_sample=False, speculative=s) for s in (None, "auto"))
assert torch.equal(plain, drafted)
from hf_specdec.cli import main
sys.argv = ["hf-specdec", "env", "--json"]
main()
"""


MOST_MEBIBYTES = 60
"""A checkout travels to machines with a GPU, which take 64 MiB at most."""


def test_a_checkout_is_small_enough_to_travel() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout of git: the size of what lies here says nothing")
    sizes = {name: (ROOT / name).stat().st_size for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    whole = sum(sizes.values()) / 2**20
    assert whole < MOST_MEBIBYTES, f"{whole:.1f} MiB, most of it in {largest}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist, made as for an upload."""
    folder = tmp_path_factory.mktemp("dist")
    pytest.importorskip("build")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


@pytest.mark.slow
def test_the_wheel_is_the_package_and_nothing_else(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "hf_specdec").rglob("*.py")}
    assert sources <= names
    assert "hf_specdec/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2
    assert tops - {"hf_specdec"} == {top for top in tops if top.endswith(".dist-info")}
    assert wheel.stat().st_size < 2e6
    done = subprocess.run(
        [sys.executable, "-c", USED, str(tmp_path / "installed")], capture_output=True, text=True, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_sdist_has_what_it_takes_to_build_and_to_read(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for path in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "NOTICE", "src/hf_specdec/__init__.py",
                 "src/hf_specdec/py.typed", "tests/conftest.py", "docs/tutorial.md", "examples/chat.py"):  # fmt: skip
        assert path in names, path
    assert not [
        name for name in names if name.startswith(("heads/data", "heads/smol", "runs/", ".venv", "benchmarks/results"))
    ]
    assert sdist.stat().st_size < 3e6


def test_the_page_of_compatibility_is_what_its_sources_state() -> None:
    assert compatibility.PAGE.read_text() == compatibility.page(), "`make compatibility` writes it again"


def test_a_release_finds_what_is_wrong() -> None:
    """Files, links and versions that `make release` refuses; it takes minutes, so it is run by hand."""
    committed = ["README.md", "docs/a.md", "src/hf_specdec/py.typed", "src/hf_specdec/cpu/kernels.cpp", "tests/zoo.py"]
    right = ["hf_specdec/py.typed", "hf_specdec/cpu/kernels.cpp", "hf_specdec-0.1.0.dist-info/METADATA"]
    assert release.contents_faults(right, committed) == []
    assert release.contents_faults([*right[1:], "tests/zoo.py"], committed) == [
        "not in the wheel: hf_specdec/py.typed", "not in the repository's src: tests/zoo.py",
    ]  # fmt: skip
    home = "https://github.com/hf-specdec/hf-specdec"
    page = (
        f"[a]({home}/blob/main/docs/a.md#b) [b]({home}/tree/main/docs) [c]({home}/blob/main/docs/b.md) [d](docs/a.md)"
    )
    assert release.broken_links(page, committed) == ["docs/a.md", "docs/b.md"]
    changelog = "# Changelog\n\n## 0.2.0 (today)\n\nNew: [a](docs/a.md).\n\n## 0.1.0\n\nOld.\n"
    rules = [{"pattern": r"\]\(([^)]+)\)", "replacement": rf"]({home}/blob/main/\1)"}]
    written = release.notes(changelog, "0.2.0", rules)
    assert written == f"# hf-specdec 0.2.0 (today)\n\nNew: [a]({home}/blob/main/docs/a.md).\n"
    with pytest.raises(ValueError, match=r"'0\.2\.0 \(today\)', the wheel is 0\.1\.0"):
        release.notes(changelog, "0.1.0", rules)


@pytest.mark.slow
def test_names_are_imported_when_they_are_used() -> None:
    """`import hf_specdec` is fast; a name of it also registers the heads with transformers' auto classes."""
    code = """
import sys
import hf_specdec
assert set(hf_specdec.__all__) <= set(dir(hf_specdec))
assert not {"torch", "transformers", "huggingface_hub"} & sys.modules.keys()
assert issubclass(hf_specdec.InvalidConfigError, ValueError)
assert "torch" not in sys.modules
hf_specdec.Budget
from transformers import AutoConfig
assert type(AutoConfig.for_model("hf_specdec_eagle")) is hf_specdec.EagleConfig
for name in hf_specdec.__all__:
    assert getattr(hf_specdec, name).__name__ == name
assert "prompt_lookup" in __import__("hf_specdec.drafters.registry").drafters.registry.methods()
try:
    hf_specdec.nothing
except AttributeError as error:
    assert "'hf_specdec' has no attribute 'nothing'" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_lazy_name_is_also_imported_for_type_checkers() -> None:
    tree = ast.parse((ROOT / "src" / "hf_specdec" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {node.module: tuple(name.name for name in node.names) for node in imports}
    assert typed == hf_specdec._MODULES
    assert sorted(name for names in typed.values() for name in names) == sorted(hf_specdec.__all__)


# ------------------------------------------------------------------------------------------------------------ packaged


START = """
import sys, torch, hf_specdec
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
print(hf_specdec.packaged_model())
"""


@pytest.mark.slow
def test_two_processes_of_a_group_convert_the_packaged_model_once(small_model_path: Path, tmp_path: Path) -> None:
    """Neither finds half of it, and it equals the one that a single process converts."""
    command = [sys.executable, "-W", "ignore", "-c", START, str(tmp_path / "group")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    folders = {process.communicate(timeout=300)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    folder = tmp_path / "hf-specdec" / small_model_path.name
    assert folders == {str(folder)}
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [small_model_path.name]
    converted, expected = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, small_model_path)
    )
    assert converted.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in converted.items())
