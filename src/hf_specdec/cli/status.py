"""Lines on stderr that show what a command is doing: with a spinner and a clock in a terminal, else plain ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def working(text: str, *, shown: bool = True) -> Iterator[None]:
    """Context manager that shows a line while its block runs; if stderr is not a terminal, the line is printed once.

    Args:
        text: What is being done.
        shown: False shows nothing. Under a launcher such as `accelerate launch`, only the first process shows it.
    """
    console = Console(stderr=True)
    shown = shown and os.environ.get("RANK", "0") == "0"
    if not shown or not console.is_terminal:  # even a disabled `Progress` prints empty lines in rich 13
        if shown:
            typer.echo(f"{text} ...", err=True)
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as line:
        line.add_task(text, total=None)
        yield


@contextmanager
def importing(*, shown: bool = True) -> Iterator[None]:
    """Context manager around a command's imports of torch and transformers, which take seconds; silences libraries.

    Commands import them after their options are parsed, so that help and mistakes are shown at once.

    Args:
        shown: Whether to show a line; none is shown if they are imported already.
    """
    with working("Importing PyTorch and transformers", shown=shown and "transformers" not in sys.modules):
        from hf_specdec.cli.quiet import silence_libraries

        silence_libraries()
        yield
