"""A line on stderr, with a spinner and a clock, that shows what a command is doing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def working(text: str, *, shown: bool = True) -> Iterator[None]:
    """Context manager that shows a line while its block runs; nothing if stderr is not a terminal.

    Args:
        text: What is being done.
        shown: False shows nothing.
    """
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as line:
        line.add_task(text, total=None)
        yield
