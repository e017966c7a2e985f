"""What a command is doing, as lines on stderr: with a spinner and a clock in a terminal, else plain ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def working(text: str, *, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show what is being done while the block runs; if stderr is not a terminal, the line is printed once.

    Yields a function that prints a further line, unless `shown` is False.

    With `shown=False` no line is printed; a terminal still shows the spinner, which is erased at the end. Under a
    launcher such as `accelerate launch`, only the first process shows anything.
    """
    console = Console(stderr=True)
    is_first = os.environ.get("RANK", "0") == "0"
    if not is_first or not console.is_terminal:  # even a disabled `Progress` prints empty lines in rich 13
        if shown and is_first:
            typer.echo(f"{text} ...", err=True)
        yield lambda found: typer.echo(found, err=True) if shown and is_first else None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as line:
        line.add_task(text, total=None)
        yield lambda found: line.console.print(found, markup=False, highlight=False) if shown else None


@contextmanager
def importing(*, shown: bool = True) -> Iterator[None]:
    """Context manager around a command's imports of torch and transformers, which take seconds; silences libraries.

    Commands import them after their options are parsed, so that help and mistakes are shown at once.
    """
    with working("Importing PyTorch and transformers", shown=shown and "transformers" not in sys.modules):
        import transformers
        from huggingface_hub.utils import logging as hub_logging

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        hub_logging.set_verbosity_error()  # no warning on each new try
        yield


def say(text: str, *, err: bool = False) -> None:
    """Print a text with line breaks between words: in the width of the terminal, or 80 columns in files and pipes."""
    Console(stderr=err).print(text, markup=False, highlight=False)
