"""What a training run shows while it goes on: a bar with rate and time left, and the log as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

UNTOLD = ("total_flos", "epoch")
"""Columns of the log that a reader of the bar knows, or does not ask for."""

COLUMN = 9
"""Characters per column at least."""


class TableCallback(TrainerCallback):
    """A progress bar, and above it one aligned row per log."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._names: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the bar where the run goes on."""
        silent = not state.is_world_process_zero
        self._bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", disable=silent)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move it."""
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write the row, and before the first one, and where the columns change, their names."""
        values = {name: value for name, value in (logs or {}).items() if name not in UNTOLD}
        if self._bar is None or not state.is_world_process_zero:
            return
        if "eval_tau" in values:
            accepted = [value for name, value in values.items() if name.startswith("eval_accepted_")]
            depths = " ".join(f"{value:.2f}" for value in accepted)
            say(f"held out, step {state.global_step}: tau {values['eval_tau']:.2f}, accepted by depth {depths}")
        if "loss" not in values:
            return
        row = {"step": state.global_step, **values}
        if list(row) != self._names:
            self._names = list(row)
            self._write(f"{short(name):>{COLUMN}}" for name in row)
        self._write(f"{_text(value):>{max(COLUMN, len(short(name)))}}" for name, value in row.items())

    def _write(self, cells: Iterable[str]) -> None:
        say("  ".join(cells))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Also where the run ended before its end."""
        if self._bar is not None:
            self._bar.close()


def say(text: str) -> None:
    """A line beside the bar, on stderr: stdout is for results."""
    tqdm.write(text, file=sys.stderr)


def short(name: str) -> str:
    """A column's heading.

    Example: `top1_accuracy_2` is "top-1 @2".
    """
    if name.startswith("top1_accuracy_"):
        return f"top-1 @{name.rsplit('_', 1)[1]}"
    return {"learning_rate": "rate", "grad_norm": "gradient", "predicted_tau": "tau"}.get(name, name)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_progress(trainer: Trainer) -> TableCallback:
    """Put the table in the place of transformers' own rows of quoted values, unless the bar is switched off."""
    table = TableCallback()
    if trainer.args.disable_tqdm:
        trainer.remove_callback(PrinterCallback)
    else:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(table)
    return table
