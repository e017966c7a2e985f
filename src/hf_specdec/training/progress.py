"""Show a training run as a progress bar, with its log as a table above the bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Thread
from typing import Any

from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

COLUMN_WIDTH = 9
"""Minimum width of a column in characters."""

HEADINGS = {"learning_rate": "rate", "grad_norm": "gradient", "predicted_tau": "tau"}
"""Headings of log values whose names are too long."""


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
        hidden = ("total_flos", "epoch")  # the bar shows the progress
        values = {name: value for name, value in (logs or {}).items() if name not in hidden}
        if self._bar is None or not state.is_world_process_zero:
            return
        if "eval_tau" in values:
            accepted = [value for name, value in values.items() if name.startswith("eval_accepted_")]
            depths = " ".join(f"{value:.2f}" for value in accepted)
            print_line(f"held out, step {state.global_step}: tau {values['eval_tau']:.2f}, accepted by depth {depths}")
        if "loss" not in values:
            return
        row = {"step": state.global_step, **values}
        headings = [HEADINGS.get(name, name.replace("top1_accuracy_", "top-1 @")) for name in row]
        if list(row) != self._names:
            self._names = list(row)
            print_line("  ".join(f"{heading:>{COLUMN_WIDTH}}" for heading in headings))
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        widths = [max(COLUMN_WIDTH, len(heading)) for heading in headings]
        print_line("  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True)))

    def close(self) -> None:
        """Close the bar; `fit` calls this when the run has ended, failed or been interrupted."""
        self._clock.close()
        if self._bar is not None:
            self._bar.close()


def show_progress(trainer: Trainer) -> TableCallback:
    """Replace transformers' progress output with a `TableCallback`, or with nothing if `disable_tqdm` is set."""
    table = TableCallback()
    if trainer.args.disable_tqdm:
        trainer.remove_callback(PrinterCallback)
    else:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(table)
    return table


@contextmanager
def ticking(bar: Any) -> Iterator[None]:
    """Redraw a bar once per second, so that its clock runs during a long step.

    Does nothing if stderr is not a terminal, where every update would be a line.
    """
    if bar.disable or not sys.stderr.isatty():
        yield
        return
    ended = Event()

    def redraw() -> None:
        while not ended.wait(1.0):
            bar.refresh()

    thread = Thread(target=redraw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def print_line(text: str) -> None:
    """Print a line above the bar, to stderr because stdout is for results."""
    tqdm.write(text, file=sys.stderr)
