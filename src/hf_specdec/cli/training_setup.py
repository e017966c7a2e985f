"""Steps that the `train` commands share: check directories and arguments, read conversations, capture features."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import set_seed

from hf_specdec import records, training
from hf_specdec.checkpoints.sources import overwritten
from hf_specdec.cli.options import check_writable_directory
from hf_specdec.cli.runs import load_conversations, print_note
from hf_specdec.errors import InvalidConfigError, listed
from hf_specdec.training.features import check_features_folder
from hf_specdec.training.runs import RUN_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from hf_specdec.training import Conversation
    from hf_specdec.training.features import TrainingData

HELD_OUT_EVERY, MAX_HELD_OUT = 20, 64
"""By default, one in 20 conversations is held out for evaluation, but no more than 64."""


class TrainingRun:
    """Directories and training arguments of a `train` command; raises `InvalidConfigError` if one cannot be used.

    Args:
        output: Directory for the head, checkpoints and log.
        features: Directory for captured features; None computes them in every step.
        more: `TrainingArguments` that override `fields`.
        **fields: `TrainingArguments`, `seed` included.
    """

    def __init__(self, output: Path, features: Path | None, more: dict[str, Any], **fields: Any) -> None:
        check_writable_directory(output, "--output")
        check_writable_directory(features, "--features")
        _check_own_run(output)
        check_features_folder(features)
        self._output, self._features, self._more, self._fields = output, features, more, fields
        self.arguments(held_out=True)  # raises if an argument is invalid

    def arguments(self, subfolder: str = "", *, held_out: bool = False) -> TrainingArguments:
        """Set the random seed and return the Trainer's arguments; checkpoints go to a subfolder of the output."""
        set_seed(self._fields["seed"])
        return training.head_arguments(self._output / subfolder, self._more, held_out=held_out, **self._fields)

    def prepare(
        self,
        target: PreTrainedModel,
        conversations: list[Conversation],
        evaluation: list[Conversation],
        layers: tuple[int, ...],
    ) -> tuple[TrainingArguments, TrainingData, TrainingData | None]:
        """Return the Trainer's arguments and the data for training and evaluation (or None).

        The data are the conversations, or features captured from them.
        """
        stored, measured = self._data(target, conversations, evaluation, layers)
        return self.arguments(held_out=bool(evaluation)), stored, measured

    def _data(
        self,
        target: PreTrainedModel,
        conversations: list[Conversation],
        evaluation: list[Conversation],
        layers: tuple[int, ...],
    ) -> tuple[TrainingData, TrainingData | None]:
        if self._features is None:
            return conversations, evaluation or None
        size = training.feature_bytes(target, [*conversations, *evaluation], layers)
        print_note(f"{size / 1e9:.2f} GB of features will be stored in {self._features}")
        stored = training.capture_features(target, conversations, self._features, layers=layers, progress=True)
        if not evaluation:
            return stored, None
        return stored, training.capture_features(target, evaluation, self._features / "held-out", layers=layers)


def _check_own_run(output: Path) -> None:
    """Raise `InvalidConfigError` if the output directory holds state or a head that no run of this package wrote."""
    found = [name for name in (RUN_NAME, "trainer_state.json") if (output / name).exists()]
    if found and (
        RUN_NAME not in found or not {"head", "settings", "data"} <= records.read_json(output / RUN_NAME).keys()
    ):
        raise InvalidConfigError(
            f"--output {output} holds a {found[0]} that was not written by this command.", "Give another directory."
        )
    lost = [] if found else overwritten(output)
    if lost:
        raise InvalidConfigError(
            f"--output {output} holds {listed(lost)}, which was not trained by this command.",
            "Give another directory.",
        )


def split_conversations(
    data: list[str], model: str | None, max_length: int, held_out: int | None, drop_seen: float | None
) -> tuple[list[Conversation], list[Conversation]]:
    """Read conversations; return those for training (no near-duplicates if `drop_seen` is set) and those held out.

    Raises:
        InvalidConfigError: No conversations can be read, or `held_out` or `drop_seen` leaves none for training.
    """
    conversations = load_conversations(data, model, max_length)
    count = min(len(conversations) // HELD_OUT_EVERY, MAX_HELD_OUT) if held_out is None else held_out
    kept, evaluation = training.hold_out(conversations, count)
    if not kept:
        raise InvalidConfigError(f"--held-out {count} leaves none of {len(conversations)} conversations to train on.")
    if drop_seen is not None:
        before, kept = len(kept), training.drop_near_duplicates(kept, drop_seen, evaluation)
        if not kept:
            raise InvalidConfigError(
                f"--drop-seen {drop_seen} leaves none of {before} conversations to train on.",
                "Give a larger fraction, or conversations whose answers repeat less.",
            )
        print_note(f"Dropped {before - len(kept)} of {before} conversations: over {drop_seen:.0%} repeated elsewhere.")
    return kept, evaluation


def check_run(output: Path, head: Any, config: Any, conversations: list[Conversation]) -> None:
    """Raise `InvalidConfigError` if the output directory holds a run with another head, other settings or data."""
    opened: Any = training.openings(conversations, config.answer_tokens)
    training.check_same_run(output, training.run_facts(head, config, [len(one.input_ids) for one in opened]))
