"""The notebooks run from top to bottom, and are committed with what they showed."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from run_notebooks import executed

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


SHORTER = {
    "max_new_tokens=96": "max_new_tokens=16", '"max_new_tokens": 96': '"max_new_tokens": 16', "rounds=2": "rounds=1",
    "max_new_tokens=64": "max_new_tokens=16", "max_new_tokens=48": "max_new_tokens=16",
    '"max_new_tokens": 48': '"max_new_tokens": 16', "max_new_tokens=40": "max_new_tokens=16",
    "max_steps=100": "max_steps=4", '"save_steps": 25, "logging_steps": 5': '"save_steps": 2, "logging_steps": 1',
    "[:400]": "[:40]",
}  # fmt: skip
"""What the suite changes in their code: the same steps, fewer of them."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_with_its_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    for cell in cells:
        names = [output.get("name") for output in cell.outputs if output.output_type == "stream"]
        assert len(names) == len(set(names)), "a stream is kept in pieces: make notebooks"


def test_what_is_made_shorter_is_there() -> None:
    code = "".join(cell.source for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells)
    assert all(before in code for before in SHORTER)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, small_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = executed(path, changes=SHORTER)
    shown = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    assert re.search(r"the same ids: (True|\d+ of \d+)", shown)
    assert "the same ids: False" not in shown
