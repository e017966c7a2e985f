"""The commands `hf-specdec distill` and `hf-specdec train ...`, also for use under `accelerate launch`.

All options are checked before the target model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli.help import Command, Group, epilog_of
from hf_specdec.cli.parameters import (
    OBJECT,
    BatchSize,
    Json,
    LearningRate,
    ModelOption,
    Output,
    RoundActivations,
    Seed,
    TrainingPrecision,
    TrainOptions,
    check_places,
    check_writable_directory,
    expanded,
    read_object_option,
    require_package,
    temperature_in_range,
)
from hf_specdec.cli.status import importing
from hf_specdec.errors import InvalidConfigError
from hf_specdec.validation import MAX_STEPS

if TYPE_CHECKING:
    from hf_specdec.training import Prompt


def distill_data(
    output: Output,
    prompts: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="File with prompts, or a dataset name.")
    ] = None,
    invent: Annotated[int, typer.Option(min=0, help="Number of additional prompts for the model to invent.")] = 0,
    model: ModelOption = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Split of the dataset.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts.")] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            callback=temperature_in_range,
            help="Sampling temperature; 0 is greedy. Can be repeated for a mix. Default: 0, 0.7 and 1 in turn.",
        ),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="User turns per conversation; missing ones are invented.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per generate() call, or concurrent requests.")] = 32,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of a vLLM or SGLang server that answers; --model then names the tokenizer."
        ),
    ] = None,
    server_model: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the model on the server.")] = None,
    unseeded: Annotated[
        bool, typer.Option("--unseeded", help="Send no seeds to the server (vLLM on a CPU fails with some seeds).")
    ] = False,
    seed: Seed = 0,
    dtype: TrainingPrecision = "bfloat16",
    round_activations: RoundActivations = False,
    as_json: Json = False,
) -> None:
    """Generate training data: let the target model answer prompts."""
    if prompts is None and not invent:
        raise InvalidConfigError("There are no prompts.", "Give --prompts or --invent N.")
    if server is not None and round_activations:
        raise InvalidConfigError("--round-activations is for a target that runs here.", "Drop it, or --server.")
    if server is None and (server_model is not None or unseeded):
        option = "--unseeded" if server_model is None else "--server-model"
        raise InvalidConfigError(f"{option} needs a server.", "Give --server URL, or drop it.")
    require_package("datasets", "Distilling", "training")
    if server is not None:
        require_package("openai", "Distilling from a server", "training")
    check_writable_directory(output, "--output")
    check_places(model, data=[] if prompts is None else [prompts], round_activations=round_activations)
    with importing(shown=not as_json):
        from hf_specdec import training
        from hf_specdec.cli.training_run import load_training_target, print_result
        from hf_specdec.generation.loading import end_tokens, load_tokenizer
        from hf_specdec.training.distillation import check_new_data, check_prompts

    given: list[Prompt] = [] if prompts is None else training.read_prompts(prompts, split=split, limit=limit)
    if not given and not invent:
        raise InvalidConfigError(f"--prompts {prompts} holds no prompts.", "Give another file, or --invent N.")
    questions = [*given, *training.invented_prompts(invent)]
    check_prompts(questions, load_tokenizer(model), turns)
    check_new_data(output)
    config = training.DistillConfig(
        max_new_tokens=max_new_tokens, num_turns=turns, batch_size=batch_size, seed=seed,
        temperatures=tuple(temperature or training.DistillConfig().temperatures),
    )  # fmt: skip
    target: Any
    if server is None:
        target, tokenizer = load_training_target(model, dtype, shown=not as_json, round_activations=round_activations)
    else:
        tokenizer = load_tokenizer(model)
        target = training.ServerTeacher(
            server, tokenizer, server_model, num_requests=batch_size, seeded=not unseeded, end_ids=end_tokens(model)
        )
    training.distill(target, tokenizer, questions, output, config)
    conversations = training.read_conversations(output)
    answer_tokens = sum(sum(conversation.loss_mask) for conversation in conversations)
    result = {"output": str(output), "conversations": len(conversations), "answer_tokens": answer_tokens}
    print_result(result if server is None else {**result, "dropped": dict(target.lost)}, as_json)


# ------------------------------------------------------------------------------------------------------------ train


def _head_fields(examples: str) -> Any:
    return typer.Option(metavar=OBJECT, help=f"More fields of the head's config ({examples}, ...).")


def _recipe(examples: str) -> Any:
    return typer.Option(metavar=OBJECT, help=f"Fields of the training recipe ({examples}).")


RandomStart = Annotated[
    bool, typer.Option("--random-start", help="Start from random weights instead of the target's.")
]


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(TrainOptions):
    """Options of `train medusa`."""

    num_heads: Annotated[
        int | None, typer.Option(min=1, max=64, help="Number of heads; each drafts one token. Default: 4.")
    ] = None
    num_layers: Annotated[int | None, typer.Option(min=1, max=64, help="Residual blocks per head. Default: 1.")] = None
    own_lm_head: Annotated[bool, typer.Option("--own-lm-head", help="Train an lm_head per head.")] = False
    joint: Annotated[
        bool, typer.Option("--joint", help="Medusa-2: also train an adapter of the target and merge it.")
    ] = False
    recipe: Annotated[str | None, _recipe("head_decay, soft_labels, answer_tokens")] = None
    head_fields: Annotated[str | None, _head_fields("num_draft_tokens, tree")] = None
    learning_rate: LearningRate = 1e-3


@expanded
def medusa(options: MedusaOptions) -> None:
    """Train Medusa heads on a frozen target (Medusa-1), or with --joint together with it (Medusa-2)."""
    if options.joint:
        require_package("peft", "Medusa-2", "training")
        if options.held_out or options.recipe is not None:
            raise InvalidConfigError("--joint cannot be combined with --held-out or --recipe.", "Drop one of them.")
        if (options.output / SAVED_MODEL).exists() and not (options.output / "run.json").exists():
            raise InvalidConfigError(
                f"--output {options.output} holds {SAVED_MODEL}, where --joint saves the target.",
                "Give another directory.",
            )
    fields = {"medusa_num_heads": options.num_heads, "medusa_num_layers": options.num_layers,
              "shared_lm_head": False if options.own_lm_head else None}  # fmt: skip
    _train("medusa", options, fields, {}, saved_model=SAVED_MODEL if options.joint else None)


SAVED_MODEL = "model"
"""Subfolder of the output directory to which `--joint` saves the target."""


def _existing_version(version: int) -> int:
    """Refuse versions of which no heads can be trained; a callback of the option."""
    if version == 2:
        raise typer.BadParameter("EAGLE-2 uses EAGLE-1 heads with dynamic trees. Use --version 1.")
    if version not in (1, 3):
        raise typer.BadParameter(f"must be 1 or 3, got {version}")
    return version


@dataclass(frozen=True, kw_only=True)
class EagleOptions(TrainOptions):
    """Options of `train eagle`."""

    version: Annotated[
        int,
        typer.Option(
            metavar="1|3",
            callback=_existing_version,
            help="EAGLE version: 1 (its heads also draft EAGLE-2 trees) or 3.",
        ),
    ] = 3
    aligned_steps: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_STEPS, help="Draft depth simulated in training. Default: 4 (3 with --version 1)."),
    ] = None
    random_start: RandomStart = False
    norm_output: Annotated[
        bool | None,
        typer.Option(
            "--norm-output",
            help="EAGLE-3.1: the next draft step reads the head's normalised output. Of other engines, only those "
            "that support EAGLE-3.1 can load the head.",
        ),
    ] = None
    recipe: Annotated[str | None, _recipe("step_decay, soft_tokens, noise, ...")] = None
    head_fields: Annotated[str | None, _head_fields("intermediate_size, num_steps, top_k")] = None


@expanded
def eagle(options: EagleOptions) -> None:
    """Train an EAGLE head: version 1, which uses the target's lm_head, or version 3, which has its own."""
    kind = "eagle" if options.version == 1 else "eagle3"
    fields, settings = {"norm_output": options.norm_output}, {"aligned_steps": options.aligned_steps}
    _train(kind, options, fields, settings, random_start=options.random_start)


@dataclass(frozen=True, kw_only=True)
class BlockOptions(TrainOptions):
    """Options of `train dflash`."""

    num_layers: Annotated[int | None, typer.Option(min=1, max=64, help="Layers of the head. Default: 2.")] = None
    block_size: Annotated[
        int | None, typer.Option(min=2, max=64, help="Slots of a block, the last emitted token included. Default: 8.")
    ] = None
    causal: Annotated[bool, typer.Option("--causal", help="Slots see only earlier slots (JetSpec).")] = False
    markov_rank: Annotated[
        int | None,
        typer.Option(min=0, help="Rank of the head that reads the previous token (DSpark). Default: 0, none."),
    ] = None
    confidence: Annotated[
        bool, typer.Option("--confidence", help="Also predict how likely each token is accepted (DSpark).")
    ] = False
    mask_token_id: Annotated[
        int | None,
        typer.Option(
            min=0, help="Token that stands for tokens to predict. Default: one that the data do not contain."
        ),
    ] = None
    anchors: Annotated[int | None, typer.Option(min=1, help="Blocks per conversation and step. Default: 64.")] = None
    random_start: RandomStart = False
    recipe: Annotated[str | None, _recipe("slot_decay, text_weight, soft_weight, ...")] = None
    head_fields: Annotated[str | None, _head_fields("intermediate_size, own_lm_head, all_children")] = None
    batch_size: BatchSize = 4
    learning_rate: LearningRate = 6e-4


@expanded
def dflash(options: BlockOptions) -> None:
    """Train a block head, which drafts a whole block of tokens in one forward (DFlash, JetSpec, DSpark)."""
    has_markov = bool(options.markov_rank)  # such a head drafts from the root's slot, as DSpark does
    fields = {
        "num_hidden_layers": options.num_layers, "block_size": options.block_size,
        "mask_token_id": options.mask_token_id, "causal": options.causal or None,
        "markov_rank": options.markov_rank, "sample_from_anchor": has_markov or None,
        "confidence_head": options.confidence or None,
        "confidence_with_markov": (options.confidence and has_markov) or None,
    }  # fmt: skip
    _train("dflash", options, fields, {"anchors": options.anchors}, random_start=options.random_start)


def _train(
    kind: str, options: TrainOptions, fields: dict[str, Any], settings: dict[str, Any], *, random_start: bool = False,
    saved_model: str | None = None,
) -> None:  # fmt: skip
    """Check the options of a run, import torch, and train.

    `fields` are of a new head's config, and `settings` of the recipe; None is the default. `--head-fields` overrides
    the first, and the second override `--recipe`.
    """
    initial = options.initial_head
    fields = {**fields, "draft_vocab_size": options.draft_vocab_size}
    given = {name: value for name, value in fields.items() if value is not None}
    given |= read_object_option(options.head_fields, "--head-fields")
    if given and initial is not None:
        raise InvalidConfigError(
            f"--initial-head {initial} has its own config; {', '.join(given)} would be ignored.",
            "Drop these options, or train a new head.",
        )
    if initial is not None and random_start:
        raise InvalidConfigError("--random-start cannot be combined with --initial-head.", "Drop one of them.")
    recipe = read_object_option(options.recipe, "--recipe")
    recipe |= {name: value for name, value in settings.items() if value is not None}
    more = read_object_option(options.more, "--arguments")
    check_writable_directory(options.output, "--output")
    check_writable_directory(options.features, "--features")
    check_places(options.model, initial, options.data, round_activations=options.round_activations)
    with importing(shown=not options.as_json):
        from hf_specdec.cli.training_run import train_head
    train_head(kind, options, given, recipe, more, random_start=random_start, saved_model=saved_model)


_TRAIN = "hf-specdec train {} --model org/model --data data --output head"
_PAGE = "training.md"

train = typer.Typer(
    cls=Group, help="Train a draft head for a model on the model's own answers.",
    add_completion=False, rich_markup_mode="rich",
    epilog=epilog_of((
        "hf-specdec distill --model org/model --prompts prompts.jsonl --output data", _TRAIN.format("eagle"),
    ), _PAGE),
)  # fmt: skip

for _command, _options in (
    (eagle, " --features features --draft-vocab-size 8192"),
    (dflash, " --features features --draft-vocab-size 8192 --markov-rank 32"),
    (medusa, " --features features"),
):
    _example = _TRAIN.format(_command.__name__) + _options
    train.command(cls=Command, epilog=epilog_of((_example,), _PAGE))(_command)
