"""What `distill`, `train` and `tree` do with their checked options: load target and data, start and train heads."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import typer
from rich.console import Console
from transformers import set_seed

from hf_specdec import records, training, viz
from hf_specdec.checkpoints.formats import Head
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.checkpoints.sources import overwritten
from hf_specdec.cli.parameters import TrainOptions
from hf_specdec.cli.status import working
from hf_specdec.errors import InvalidConfigError, SpeculativeDecodingError, listed
from hf_specdec.generation.loading import load_config, load_target, load_tokenizer
from hf_specdec.heads.card import RUN_PICTURE
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.head import portable_name
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.training.feature_store import check_features_folder
from hf_specdec.training.objectives import check_full_attention
from hf_specdec.training.run_setup import RUN_NAME, processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from hf_specdec.training import Conversation
    from hf_specdec.training.feature_store import TrainingData

HELD_OUT_EVERY, MAX_HELD_OUT = 20, 64
"""By default, one in 20 conversations is held out for evaluation, but no more than 64."""


# ------------------------------------------------------------------------------------ shared with `distill` and `tree`


def load_training_target(
    name: str | None, dtype: str, *, shown: bool = False, round_activations: bool = False
) -> tuple[PreTrainedModel, Any]:
    """Load a target model and its tokenizer; put the model on this process's device, in evaluation mode."""
    with working("Loading the model", shown=shown):
        target, tokenizer = load_target(name, dtype, round_activations=round_activations)
    return target.to(processes().device).eval(), tokenizer


def load_conversations(data: list[str], model: str | None, max_length: int) -> list[Conversation]:
    """Read conversations, truncate them to `max_length` tokens, drop any left with fewer than two answer tokens."""
    conversations = training.read_conversations(*data, tokenizer=load_tokenizer(model))
    cut = [training.Conversation(one.input_ids[:max_length], one.loss_mask[:max_length]) for one in conversations]
    kept = [one for one in cut if sum(one.loss_mask) > 1]
    if not kept:
        raise InvalidConfigError(
            f"{', '.join(data)} holds no answers to train on.", "Generate some with `hf-specdec distill`."
        )
    return kept


def print_result(result: dict[str, Any], as_json: bool) -> None:
    """Print a command's result on stdout, as JSON or one line per entry, from the main process only."""
    if not processes().is_main_process:
        return
    if as_json:
        typer.echo(json.dumps(result))
        return
    for name, value in result.items():
        typer.echo(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


def _note(text: str) -> None:
    """Print a message on stderr, from the main process only."""
    if processes().is_main_process:
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------------------ kinds of heads


@dataclass(frozen=True)
class HeadKind:
    """How heads of a kind are made, started and trained by a `train` command."""

    loaded: Any  # class of the heads that can be continued, or a union of classes
    named: str  # the same in words, for an error message
    head: Any  # class of new heads
    recipe: Callable[[Any], Any]  # the default training recipe of a head
    train: Callable[..., Any]


HEAD_KINDS = {
    "medusa": HeadKind(MedusaHeads, "Medusa heads", MedusaHeads, lambda _: training.MedusaTrainingConfig(),
                       training.train_medusa),
    "eagle": HeadKind(EagleHead | Eagle3Head, "an EAGLE head", EagleHead, training.EagleTrainingConfig.for_head,
                      training.train_eagle),
    "eagle3": HeadKind(EagleHead | Eagle3Head, "an EAGLE head", Eagle3Head, training.EagleTrainingConfig.for_head,
                       training.train_eagle),
    "dflash": HeadKind(DFlashHead, "a block head", DFlashHead, lambda _: training.DFlashTrainingConfig(),
                       training.train_dflash),
}  # fmt: skip


def _start(head: Head, target: Any) -> None:
    """Copy weights of the target into a new head that has parts of the same kind, and print what was copied."""
    if isinstance(head, MedusaHeads):
        head.start_from(target.get_output_embeddings())
    elif isinstance(head, Eagle3Head | DFlashHead):
        copied = "the target's lm_head, final norm and second-to-last layer"
        if isinstance(head, Eagle3Head):
            misfits = training.start_from_target(head, target)
        else:
            copied = "the last layers and the final norm of the target"
            misfits = training.start_block_from_target(head, target)
            if not misfits:
                training.start_first_layer(head, target)
        random = f"random weights: the target's {', '.join(misfits)} do not fit"
        _note(f"The head starts from {random if misfits else copied}.")


def _head_to_train(kind: HeadKind, options: TrainOptions, fields: dict[str, Any], path: str | None) -> Any:
    """Create a head with random weights, or load the initial one in float32; store the target's name in its config.

    A new head is checked, before it is made, to fit the target and the free main memory. `path` is that of the target
    relative to the head's directory, if the target is saved there.
    """
    target_config = load_config(options.model)
    text_config = target_config.get_text_config(decoder=True)
    if options.initial_head is None:
        defaults = {"bias": False} if kind.head is EagleHead else {}
        config = kind.head.config_class.for_target(target_config, **{**defaults, **fields})
        with torch.device("meta"):
            planned = kind.head(copy.deepcopy(config))
        planned.check_sizes(text_config)
        needed, free = sum(weight.nbytes for weight in planned.parameters()), psutil.virtual_memory().available
        if needed > free:
            raise InvalidConfigError(
                f"The head needs {needed / 1e9:.1f} GB for its weights, but only {free / 1e9:.1f} GB of memory is "
                "free.",
                "Reduce sizes in --head-fields, or give a --draft-vocab-size.",
            )
        head: Any = kind.head(config)
    else:
        loaded = load_head(options.initial_head)
        if not isinstance(loaded, kind.loaded):
            raise InvalidConfigError(
                f"--initial-head {options.initial_head} must be {kind.named}, got {type(loaded).__name__}."
            )
        head = loaded.float()
    head.check_sizes(text_config)
    if isinstance(head, DFlashHead):
        check_full_attention(head)
    name = head.config.base_model_name_or_path
    head.config.base_model_name_or_path = options.base_model_name or path or portable_name(name)
    return head


def choose_mask_token(tokenizer: Any, conversations: list[Conversation], vocab_size: int) -> int:
    """Return a token to stand for the tokens that a block head predicts: one that never occurs in the conversations.

    Prefers rows of the embedding beyond the tokenizer's vocabulary, which no text uses, then added and special tokens,
    then any token.
    """
    used = {token for one in conversations for token in one.input_ids}
    used |= {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    beyond = range(vocab_size - 1, len(tokenizer) - 1, -1)
    added = sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}, reverse=True)
    for token in (*beyond, *added, *range(vocab_size - 1, -1, -1)):
        if token < vocab_size and token not in used:
            return int(token)
    raise InvalidConfigError(
        "All tokens occur in the data, so none is left to stand for tokens to predict.",
        "Name a token that texts rarely contain with --mask-token-id.",
    )


# ------------------------------------------------------------------------------------------------------------- a run


def train_head(
    kind_name: str, options: TrainOptions, fields: dict[str, Any], recipe: dict[str, Any], more: dict[str, Any], *,
    random_start: bool, saved_model: str | None,
) -> None:  # fmt: skip
    """Train a head and save it; everything is checked before the target's weights are loaded.

    With `saved_model`, a subfolder of the output directory, the target is trained as well and saved there (Medusa-2).
    """
    kind, output, is_new = HEAD_KINDS[kind_name], options.output, options.initial_head is None
    _check_own_run(output)
    check_features_folder(options.features)

    def arguments(subfolder: str = "", *, held_out: bool = False) -> TrainingArguments:
        """Set the random seed and return the Trainer's arguments; checkpoints go to a subfolder of the output."""
        set_seed(options.seed)
        return training.head_arguments(
            output / subfolder, more, held_out=held_out, num_train_epochs=options.epochs,
            max_steps=-1 if options.max_steps is None else options.max_steps, seed=options.seed,
            per_device_train_batch_size=options.batch_size, gradient_accumulation_steps=options.accumulate,
            learning_rate=options.learning_rate,
        )  # fmt: skip

    arguments(held_out=True)  # raises if one is invalid
    head = _head_to_train(kind, options, fields, None if saved_model is None else f"./{saved_model}")
    conversations, evaluation = _split_conversations(options, held_out=0 if saved_model else options.held_out)
    if is_new and head.config.draft_vocab_size is not None:
        head.set_hot_token_ids(training.most_frequent_tokens(conversations, head.config.draft_vocab_size))
    if is_new and kind.head is DFlashHead and "mask_token_id" not in fields:
        tokenizer = load_tokenizer(options.model)
        head.config.mask_token_id = choose_mask_token(tokenizer, conversations, head.config.vocab_size)
    config = kind.recipe(head).changed(**recipe)
    if saved_model is None:  # else the Trainer's own check has to do
        opened: Any = training.openings(conversations, config.answer_tokens)
        training.check_same_run(output, training.run_facts(head, config, [len(one.input_ids) for one in opened]))
    target, tokenizer = load_training_target(
        options.model, options.dtype, shown=not options.as_json, round_activations=options.round_activations
    )
    if is_new and not random_start:
        _start(head, target)
    measured: TrainingData | None = None
    if saved_model is None:
        own: tuple[int, ...] = getattr(head, "feature_layers", ())  # Medusa heads read that of the labels only
        layers = (*dict.fromkeys(layer for layer in own if layer != training.LAST), training.LAST)
        stored, measured = _features(options.features, target, conversations, evaluation, layers)
        settings = arguments(held_out=bool(evaluation))
        trained = kind.train(target, head, stored, settings, config, resume=True, held_out=measured)
    else:
        trained = head
        adapted = training.train_medusa2(
            target, head, conversations, arguments(), heads_arguments=arguments("heads"), resume=True
        )
        if processes().is_main_process:
            adapted.merge_and_unload().save_pretrained(output / saved_model)
            tokenizer.save_pretrained(output / saved_model)
    if processes().is_main_process:
        _save_head(trained, output, options.as_json)
        if measured is not None:
            _print_expected_speed(target, trained, measured)
    processes().wait_for_everyone()  # the launcher stops all other processes when one exits


def _check_own_run(output: Path) -> None:
    """Refuse an output directory that holds state or a head that no run of this package wrote."""
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


def _split_conversations(options: TrainOptions, held_out: int | None) -> tuple[list[Conversation], list[Conversation]]:
    """Read conversations; return those for training, no near-duplicates if `--drop-seen` is given, and the others."""
    conversations = load_conversations(options.data, options.model, options.max_length)
    count = min(len(conversations) // HELD_OUT_EVERY, MAX_HELD_OUT) if held_out is None else held_out
    kept, evaluation = training.hold_out(conversations, count)
    if not kept:
        raise InvalidConfigError(f"--held-out {count} leaves none of {len(conversations)} conversations to train on.")
    share = options.drop_seen
    if share is not None:
        before, kept = len(kept), training.drop_near_duplicates(kept, share, evaluation)
        if not kept:
            raise InvalidConfigError(
                f"--drop-seen {share} leaves none of {before} conversations to train on.",
                "Give a larger fraction, or conversations whose answers repeat less.",
            )
        _note(f"Dropped {before - len(kept)} of {before} conversations: over {share:.0%} repeated elsewhere.")
    return kept, evaluation


def _features(
    folder: Path | None, target: PreTrainedModel, conversations: list[Conversation], evaluation: list[Conversation],
    layers: tuple[int, ...],
) -> tuple[TrainingData, TrainingData | None]:  # fmt: skip
    """Return the data for training and evaluation: the conversations, or features captured from them in a folder."""
    if folder is None:
        return conversations, evaluation or None
    size = training.feature_bytes(target, [*conversations, *evaluation], layers)
    _note(f"{size / 1e9:.2f} GB of features will be stored in {folder}")
    stored = training.capture_features(target, conversations, folder, layers=layers, progress=True)
    if not evaluation:
        return stored, None
    return stored, training.capture_features(target, evaluation, folder / "held-out", layers=layers)


def _save_head(head: Head, output: Path, as_json: bool) -> None:
    """Convert a trained head to bfloat16 and save it; plot its training log; print the final accuracies and taus.

    Draws nothing without matplotlib, or if the log has no accuracies.
    """
    log = records.read_json(output / "trainer_state.json", 256 * 2**20)["log_history"]  # training adds entries
    rows = [row for row in log if "predicted_tau" in row]
    if rows and importlib.util.find_spec("matplotlib") is None:
        _note(f"{RUN_PICTURE} was not drawn. Run: pip install matplotlib")
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
        _note("The head does not name its target because --model is a local path. Set --base-model-name.")
    print_result({"output": str(output), **last, **evaluation}, as_json)


def _print_expected_speed(target: PreTrainedModel, head: Head, evaluation: TrainingData) -> None:
    """Estimate a head's speed-up on this device from held-out data, and print it, or why it cannot be estimated."""
    head = head.to(target.device, target.dtype)
    try:
        with working("Estimating the speed-up on this device"):
            found = training.find_tree(target, head, evaluation, max_nodes=32)
    except SpeculativeDecodingError as error:
        _note(f"The speed-up could not be estimated: {error}")
        return
    _note(
        f"Estimate for this device: {found.expected_speed_up:.2f}x plain decoding, "
        f"{found.expected_tau[found.num_nodes]:.2f} tokens per forward with a static tree of {found.num_nodes} nodes. "
        "Measure it with `hf-specdec bench`."
    )
