"""Run the notebooks and keep what they show; a stream is kept as one text, not as the pieces in which it came.

Of a widget only its picture is kept: GitHub, nbconvert and a notebook without a kernel would show nothing else.
A notebook with pictures stores a hash of the code that drew them, so that a test finds pictures of older code.

python tests/run_notebooks.py [NAME ...] [--force]     `make notebooks`

A notebook that shows times is only run on an idle machine, unless --force is given.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from hf_specdec.bench.machine import OtherProcesses, is_disturbed

FOLDER = Path(__file__).parents[1] / "notebooks"
PACKAGE = Path(__file__).parents[1] / "src" / "hf_specdec"
DRAWING = (*sorted((PACKAGE / "viz").glob("*.py")), PACKAGE / "reporting" / "palette.py")
"""Files of the code that draws pictures."""


def code_lines(source: str) -> list[str]:
    """The lines of a module that do something: no docstrings, comments and blank lines.

    Not `ast.unparse`, whose text depends on the version of Python.
    """
    texts = [node for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]  # fmt: skip
    skipped = {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = [re.sub(r"(^|\s+)# .*", "", line) for line in source.splitlines()]
    return [line for number, line in enumerate(lines, start=1) if number not in skipped and line.strip()]


def drawing_hash() -> str:
    """A hash of the code that draws pictures; changes of docstrings and comments do not change it."""
    lines = [line for path in DRAWING for line in code_lines(path.read_text())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def has_pictures(notebook: nbformat.NotebookNode) -> bool:
    """Whether the notebook's code uses `hf_specdec.viz`."""
    return any(cell.cell_type == "code" and "viz." in cell.source for cell in notebook.cells)


def stored_hash(notebook: nbformat.NotebookNode) -> str | None:
    """The hash of the code that drew the notebook's pictures."""
    return notebook.metadata.get("hf_specdec", {}).get("drawing_hash")


def executed(path: Path, timeout: int = 3600, changes: Mapping[str, str] | None = None) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run; changes are made in its code before."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for before, after in (changes or {}).items():
            if cell.cell_type == "code":
                cell.source = cell.source.replace(before, after)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=timeout, resources=resources, coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    return notebook


WIDGET = "application/vnd.jupyter.widget-view+json"


def without_widgets(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with a picture instead of every widget, each of which must have one."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if WIDGET in output.get("data", {}):
                assert "image/png" in output.data, f"a widget without a picture: {cell.source}"
                del output.data[WIDGET]
    notebook.metadata.pop("widgets", None)
    return notebook


TIME = re.compile(r"\d m?s\b|tokens/s|\dx plain")
"""A time or a speed in an output."""

WATCHED_SECONDS = 5.0
"""Time for which the CPU load is measured before a notebook with times is run."""


TIMED_PLOT = re.compile(r"plot_timeline\(|plot_costs\(")
"""Code that draws times."""


def shows_times(notebook: nbformat.NotebookNode) -> bool:
    """Whether the stored outputs contain times."""
    texts = [
        str(output.get("text") or output.get("data", {}).get("text/plain", ""))
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    ]
    return any(map(TIME.search, texts)) or any(TIMED_PLOT.search(cell.source) for cell in notebook.cells)


def refuse_busy_machine(name: str, others: OtherProcesses, seconds: float) -> None:
    """Exit if other processes used the CPU for the given seconds, in which `others` watched them."""
    cores = others.cores()
    if is_disturbed(cores, seconds):
        raise SystemExit(f"{name} shows times, and other processes use {cores:.2f} cores. Wait for them, or --force.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all, or those whose names begin as asked."""
    parser = argparse.ArgumentParser(description="Run the notebooks and keep what they show.")
    parser.add_argument("names", nargs="*", help="how the names of the notebooks begin; default: all")
    parser.add_argument("--force", action="store_true", help="also run notebooks that show times on a busy machine")
    options = parser.parse_args(arguments)
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not options.names or path.name.startswith(tuple(options.names)):
            is_watched = not options.force and shows_times(nbformat.read(path, as_version=4))
            others = OtherProcesses()
            if is_watched:
                time.sleep(WATCHED_SECONDS)
                refuse_busy_machine(path.name, others, WATCHED_SECONDS)
            others, begin = OtherProcesses(), time.perf_counter()
            notebook = without_widgets(executed(path))
            if is_watched:
                refuse_busy_machine(path.name, others, time.perf_counter() - begin)
            if has_pictures(notebook):
                notebook.metadata["hf_specdec"] = {"drawing_hash": drawing_hash()}
            nbformat.write(notebook, path)
            print(path.name, flush=True)


if __name__ == "__main__":
    main()
