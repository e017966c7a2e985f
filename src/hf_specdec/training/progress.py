"""Show a training run as a progress bar, with its log as a table above the bar."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Thread
from typing import Any

from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

HIDDEN_COLUMNS = ("total_flos", "epoch")
"""Log values left out of the table; the bar already shows the progress."""

COLUMN_WIDTH = 9
"""Minimum width of a column in characters."""


class TableCallback(TrainerCallback):
    """Trainer callback that shows a progress bar and, above it, a table with one row per logged training loss."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._clock = ExitStack()
        self._names: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the bar, at the step from which the run starts or resumes."""
        silent = not state.is_world_process_zero
        self._bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", disable=silent)
        self._clock.enter_context(ticking(self._bar))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Advance the bar."""
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Print training losses as a row, after a heading if the columns changed, and evaluations as a line of text.

        Only the main process prints; other log entries are left out.
        """
        values = {name: value for name, value in (logs or {}).items() if name not in HIDDEN_COLUMNS}
        if self._bar is None or not state.is_world_process_zero:
            return
        if "eval_tau" in values:
            accepted = [value for name, value in values.items() if name.startswith("eval_accepted_")]
            depths = " ".join(f"{value:.2f}" for value in accepted)
            print_line(f"held out, step {state.global_step}: tau {values['eval_tau']:.2f}, accepted by depth {depths}")
        if "loss" not in values:
            return
        row = {"step": state.global_step, **values}
        if list(row) != self._names:
            self._names = list(row)
            self._write(f"{_heading(name):>{COLUMN_WIDTH}}" for name in row)
        self._write(f"{_text(value):>{max(COLUMN_WIDTH, len(_heading(name)))}}" for name, value in row.items())

    def _write(self, cells: Iterable[str]) -> None:
        print_line("  ".join(cells))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Close the bar; `fit` calls this also if the run fails or is interrupted."""
        self._clock.close()
        if self._bar is not None:
            self._bar.close()


TICK_SECONDS = 1.0
"""Seconds between two updates of a bar's clock."""


@contextmanager
def ticking(bar: Any) -> Iterator[None]:
    """Context manager that redraws a bar once per second, so that its clock runs during a long step.

    Does nothing if stderr is not a terminal, where every update would be a line.
    """
    ended = Event()

    def redraw() -> None:
        while not ended.wait(TICK_SECONDS):
            bar.refresh()

    if bar.disable or not sys.stderr.isatty():
        yield
        return
    thread = Thread(target=redraw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def clock(text: str) -> Iterator[None]:
    """Context manager that shows a line with a clock while its block runs, if stderr is a terminal."""
    silent = not sys.stderr.isatty()
    with tqdm(desc=text, bar_format="{desc} {elapsed}", leave=False, disable=silent) as bar, ticking(bar):
        yield


def print_line(text: str) -> None:
    """Print a line above the bar, to stderr because stdout is for results."""
    tqdm.write(text, file=sys.stderr)


def _heading(name: str) -> str:
    """Return the column heading for the name of a log value; names without a short form are returned as they are.

    Example: `top1_accuracy_2` gives "top-1 @2".
    """
    if name.startswith("top1_accuracy_"):
        return f"top-1 @{name.rsplit('_', 1)[1]}"
    return {"learning_rate": "rate", "grad_norm": "gradient", "predicted_tau": "tau"}.get(name, name)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_progress(trainer: Trainer) -> TableCallback:
    """Replace transformers' progress output with a `TableCallback`, or with nothing if `disable_tqdm` is set.

    Returns:
        The callback; with `disable_tqdm` it is not registered and shows nothing.
    """
    table = TableCallback()
    if trainer.args.disable_tqdm:
        trainer.remove_callback(PrinterCallback)
    else:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(table)
    return table
