"""Functions shared by `distill`, `train` and `tree`: load target and conversations, save heads, print results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer
from rich.console import Console

from hf_specdec import records, training, viz
from hf_specdec.checkpoints.formats import Head
from hf_specdec.cli.status import working
from hf_specdec.errors import InvalidConfigError, SpeculativeDecodingError
from hf_specdec.generation.loading import load_target, load_tokenizer
from hf_specdec.heads.card import RUN_PICTURE
from hf_specdec.training.processes import processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specdec.training import Conversation
    from hf_specdec.training.features import TrainingData

MAX_LOG_BYTES = 256 * 2**20
"""Maximum size of `trainer_state.json`, to which training adds log entries; above the default for JSON files."""


def load_training_target(name: str | None, dtype: str, *, shown: bool = False) -> tuple[PreTrainedModel, Any]:
    """Load a target model and its tokenizer; put the model on this process's device, in evaluation mode.

    Args:
        name: Path or Hub id of the model; None is the packaged model.
        dtype: Dtype of the weights.
        shown: Whether to show on stderr what is being done.
    """
    with working("Loading the model", shown=shown):
        target, tokenizer = load_target(name, dtype)
    return target.to(processes().device).eval(), tokenizer


def is_main() -> bool:
    """Return whether this is the main process of a distributed run; True if the run has only one process."""
    return bool(processes().is_main_process)


def load_conversations(data: list[str], model: str | None, max_length: int) -> list[Conversation]:
    """Read conversations, truncate them to `max_length` tokens, and drop any left with fewer than two answer tokens.

    Raises:
        InvalidConfigError: No conversation is left, or a source cannot be read.
    """
    conversations = training.read_conversations(*data, tokenizer=load_tokenizer(model))
    cut = [training.Conversation(one.input_ids[:max_length], one.loss_mask[:max_length]) for one in conversations]
    kept = [one for one in cut if sum(one.loss_mask) > 1]
    if not kept:
        raise InvalidConfigError(
            f"{', '.join(data)} holds no answers to train on.", "Generate some with `hf-specdec distill`."
        )
    return kept


def print_note(text: str) -> None:
    """Print a message on stderr, from the main process only."""
    if is_main():
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def print_result(result: dict[str, Any], as_json: bool) -> None:
    """Print a command's result on stdout, as JSON or one line per entry, from the main process only."""
    if not is_main():
        return
    if as_json:
        typer.echo(json.dumps(result))
        return
    for name, value in result.items():
        typer.echo(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


def finish_training(
    target: PreTrainedModel, head: Head, output: Path, evaluation: TrainingData | None, as_json: bool
) -> None:
    """Save a trained head; print its accuracy and, given evaluation data, its expected speed-up on this device.

    The main process does this, while all others wait.
    """
    if is_main():
        _save_head(head, output, as_json)
        if evaluation is not None:
            _print_expected_speed(target, head, evaluation)
    processes().wait_for_everyone()  # the launcher stops all other processes when one exits


def _save_head(head: Head, output: Path, as_json: bool) -> None:
    """Convert a trained head to bfloat16 and save it; plot its training log; print the final accuracies and taus.

    Draws nothing without matplotlib, or if the log has no accuracies.
    """
    log = records.read_json(output / "trainer_state.json", MAX_LOG_BYTES)["log_history"]
    rows = [row for row in log if "predicted_tau" in row]
    if rows and importlib.util.find_spec("matplotlib") is None:
        print_note(f"{RUN_PICTURE} was not drawn. Run: pip install matplotlib")
    elif rows:
        viz.save_plot(viz.plot_run(log), output / RUN_PICTURE)
    last = {name: rows[-1][name] for name in rows[-1] if name.startswith(("top1", "predicted"))} if rows else {}
    step = (head.config.recipe or {}).get("weights of step")
    measured: dict[str, Any] = next((row for row in log if "eval_tau" in row and row["step"] == step), {})
    evaluation = {
        f"held_out_{name[5:]}": measured[name] for name in measured if name.startswith(("eval_tau", "eval_acc"))
    }
    head.to(torch.bfloat16).save_pretrained(output)
    if head.config.base_model_name_or_path is None:
        print_note("The head does not name its target because --model is a local path. Set --base-model-name.")
    print_result({"output": str(output), **last, **evaluation}, as_json)


def _print_expected_speed(target: PreTrainedModel, head: Head, evaluation: TrainingData) -> None:
    """Estimate a head's speed-up on this device from held-out data, and print it, or why it cannot be estimated."""
    head = head.to(target.device, target.dtype)
    try:
        with working("Estimating the speed-up on this device"):
            found = training.find_tree(target, head, evaluation, max_nodes=32)
    except SpeculativeDecodingError as error:
        print_note(f"The speed-up could not be estimated: {error}")
        return
    print_note(
        f"Estimate for this device: {found.expected_speed_up:.2f}x plain decoding, "
        f"{found.expected_tau[found.num_nodes]:.2f} tokens per forward with a static tree of {found.num_nodes} nodes. "
        "Measure it with `hf-specdec bench`."
    )
