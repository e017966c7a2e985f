"""The page of supported versions, processors and systems, from what pyproject.toml, the Makefile and tests state.

python tests/compatibility.py     writes docs/compatibility.md, which tests/test_package.py checks
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import oldest
from hf_specdec.cpu.library import INSTRUCTION_SETS, SYSTEM_OPTIONS
from test_cpu_library import EMULATED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
SYSTEMS = {
    "linux": ("Linux", "all tests run on it"),
    "darwin": ("macOS", "not run on it; the compiler's commands are tested"),
    "win32": ("Windows", "not run on it; the compiler's commands are tested, and linking with OpenMP"),
}
TEXT = """\
# Compatibility

`make compatibility` writes this page from `pyproject.toml`, `constraints.txt`, the `Makefile`, the changelog and
the tests.

## Versions

| | allowed | `make test` and CI | `make bounds` | `make newest` |
|---|---|---|---|---|
{versions}

`make bounds` and `make newest` run the core tests, by hand. All of them use the machine's `python3`;
`make test PYTHON=python3.12 VENV=.venv-3.12` uses another one. transformers {supported} is supported;
[every model](models.md) was tested in {walked}. Newer versions can be installed, too. The file
`transformers_private.py` has every private name of transformers that this package uses, and the probe of `attach`
compares drafts with plain decoding, so a version that does not fit usually ends in an
error there; a change that shows in long texts only would not be found. In production, pin the versions with which
everything was tested:

```bash
pip install 'hf-specdec @ git+https://github.com/hf-specdec/hf-specdec@COMMIT' transformers=={pinned} torch=={torch}
```

## Changes

Public are the names in `hf_specdec`, what the [reference](reference/generating.md) describes, the fields of configs
and statistics, the commands with their options, and the files of heads. Until version 1.0 a minor version (0.2) may
change them: the changelog says what to write instead, and if possible the old form works for one more minor version,
with a `FutureWarning`. Heads that an older version saved are read, or refused with the reason. All other modules and
names may change at any time.

## Processors

The [CPU kernels](compile.md#cpu-kernels) need a C++ compiler and one of these instruction sets, best first. Without
them, `compile="auto"` runs the eager modules.

| set | processor | needs | tested |
|---|---|---|---|
{processors}

`asimd` is NEON. "On the machine": the tests run each set that the machine's processor has. An emulator that is not
installed is skipped. Processors with AMX use `avx512_bf16`, and leave products of many rows in bfloat16 to torch,
which uses AMX. For GPUs, see the [known limits](limits.md).

## Systems

| system | kernels |
|---|---|
{systems}
"""


def page() -> str:
    """Return the text of docs/compatibility.md."""
    makefile, table = (ROOT / "Makefile").read_text(), (ROOT / "docs" / "models.md").read_text()
    torch, oldest_torch = re.findall(r"^(?:OLDEST_)?TORCH \?= torch==(\S+)$", makefile, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = ((ROOT / "constraints.txt").read_text(), "\n".join(oldest.constraints()))
    pinned, lowest = (re.search(r"^transformers==(\S+)$", lines, re.MULTILINE)[1] for lines in pins)
    bounds = dict(re.findall(r"^(torch|transformers)(>=.+)$", "\n".join(project["dependencies"]), re.MULTILINE))
    versions = [
        ("Python", project["requires-python"], "any", "any", "any"),
        ("torch", bounds["torch"], torch, oldest_torch, torch),
        ("transformers", bounds["transformers"], pinned, lowest, "newest"),
    ]
    emulators = {name: runner for name, _, runner in EMULATED}
    processors = [
        (f"`{one.name}`", one.machine, ", ".join(sorted(one.features)),
         ", ".join([*["on the machine"] * (one.machine == "x86_64"), *emulators.get(one.name, "").split()]))
        for one in INSTRUCTION_SETS
    ]  # fmt: skip
    return TEXT.format(
        versions=rows(versions),
        pinned=pinned,
        torch=torch,
        processors=rows(processors),
        systems=rows([SYSTEMS[system] for system in SYSTEM_OPTIONS]),
        supported=re.search(r"transformers ([\d.]+ to [\d.]+)", (ROOT / "CHANGELOG.md").read_text())[1],
        walked=re.search(r"transformers ([\d.]+) with", table)[1],
    )


def rows(cells: Iterable[Iterable[str]]) -> str:
    """Return lines of a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


if __name__ == "__main__":
    PAGE.write_text(page())
