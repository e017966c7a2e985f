"""Run the notebooks and keep what they show; a stream is kept as one text, not as the pieces in which it came.

Of a widget only its picture is kept: GitHub, nbconvert and a notebook without a kernel would show nothing else.

python tests/run_notebooks.py [NAME ...]     `make notebooks`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def executed(path: Path, timeout: int = 3600, changes: Mapping[str, str] | None = None) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run; changes are made in its code before."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for before, after in (changes or {}).items():
            if cell.cell_type == "code":
                cell.source = cell.source.replace(before, after)
    resources = {"metadata": {"path": str(path.parent)}}
    # the commands of this environment, whether or not it is the shell's
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
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


def main() -> None:
    """Run all, or those whose names begin as asked."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if len(sys.argv) == 1 or path.name.startswith(tuple(sys.argv[1:])):
            nbformat.write(without_widgets(executed(path)), path)
            print(path.name, flush=True)


if __name__ == "__main__":
    main()
