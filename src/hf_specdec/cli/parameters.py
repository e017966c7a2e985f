"""Options that commands share, and checks of what is given, made before torch and transformers are imported."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from hf_specdec import records
from hf_specdec.checkpoints.sources import head_directory, is_gguf, model_directory
from hf_specdec.config import ENTRY_POINTS
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.validation import unknown_method

# ---------------------------------------------------------------------------------------------- checks of one value


def finite(value: Any) -> Any:
    """Refuse infinity and NaN, also in a list; a callback of options, because typer's range check accepts NaN."""
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise typer.BadParameter(f"expected a finite number, got {number}")
    return value


def positive(value: float) -> float:
    """Refuse 0 as well; a callback of options, because typer's ranges include their ends."""
    if finite(value) <= 0:
        raise typer.BadParameter(f"must be above 0, got {value:g}")
    return value


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1000
"""Limits of temperatures above 0: below, scores may become infinite; above, all tokens are about equally likely."""


def temperature_in_range(value: Any) -> Any:
    """Refuse a temperature, also in a list, that is neither 0 nor within the limits; a callback of options."""
    for number in finite(value) if isinstance(value, list) else [finite(value)]:
        if number and not MIN_TEMPERATURE <= number <= MAX_TEMPERATURE:
            raise typer.BadParameter(
                f"must be 0 (greedy) or from {MIN_TEMPERATURE:.5f} to {MAX_TEMPERATURE}, got {number}"
            )
    return value


# --------------------------------------------------------------------------------------------------------- options

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_PRECISION_HELP = "Dtype of the weights; 'auto' is the checkpoint's."
_DEFAULT_MODEL = "Default: the packaged SmolLM2-135M-Instruct."

ModelOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help=f"Path or Hub id of the target model. {_DEFAULT_MODEL}")
]
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=f"Path or Hub id of the model. {_DEFAULT_MODEL}")
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="HEAD",
        help="Path or Hub id of a draft head for the model. Default: for the packaged model the shipped head of the "
        "method, if hf-specdec runs from a clone; otherwise none.",
    ),
]
Precision = Annotated[
    Dtype, typer.Option(help=f"{_PRECISION_HELP} Identical token ids are guaranteed in float32 only.")
]
TrainingPrecision = Annotated[Dtype, typer.Option(help=_PRECISION_HELP)]
RoundActivations = Annotated[
    bool,
    typer.Option("--round-activations", help="With a GGUF model: multiply in 8 bits, as llama.cpp does, in bfloat16."),
]
NewTokens = Annotated[int, typer.Option(min=1, help="Maximum number of generated tokens.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Data = Annotated[
    list[str],
    typer.Option(
        metavar="SOURCE", help="Output directory of `distill`, a .jsonl file or a dataset name. Can be repeated."
    ),
]
Output = Annotated[Path, typer.Option(help="Directory to write to. Run the same command again to resume.")]

BatchSize = Annotated[int, typer.Option(min=1, help="Conversations per process and forward.")]
LearningRate = Annotated[float, typer.Option(callback=positive, help="Peak learning rate.")]


OBJECT = "JSON|FILE"
"""How the help names the value of an option that takes a JSON object."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of all `train` commands; each command adds its own in a subclass."""

    data: Data
    output: Output
    model: ModelOption = None
    base_model_name: Annotated[
        str | None, typer.Option(metavar="ID", help="Hub id of the target to store in the head, if --model is a path.")
    ] = None
    recipe: str | None = None
    head_fields: str | None = None
    initial_head: Annotated[
        str | None, typer.Option(metavar="HEAD", help="Path or Hub id of a head to continue training.")
    ] = None
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Draft only the given number of most frequent tokens. Default: all tokens."),
    ] = None
    features: Annotated[
        Path | None,
        typer.Option(
            help="Directory to store the target's features in, computed once. Default: compute them in every step."
        ),
    ] = None
    max_length: Annotated[
        int, typer.Option(min=8, help="Maximum tokens per conversation; longer ones are truncated.")
    ] = 2048
    epochs: Annotated[float, typer.Option(callback=positive, help="Passes over the data; may be a fraction.")] = 2
    max_steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps; overrides --epochs.")] = None
    batch_size: BatchSize = 8
    accumulate: Annotated[int, typer.Option(min=1, help="Forwards per optimiser step (gradient accumulation).")] = 1
    learning_rate: LearningRate = 3e-4
    held_out: Annotated[
        int | None, typer.Option(min=0, help="Conversations held out for evaluation. Default: 5%, at most 64.")
    ] = None
    drop_seen: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            callback=finite,
            help="Drop conversations whose answers repeat others, or themselves, by more than this fraction.",
        ),
    ] = None
    seed: Seed = 0
    more: Annotated[
        str | None,
        typer.Option(
            "--arguments",
            metavar=OBJECT,
            help="JSON object, or a file with one, of more transformers TrainingArguments (bf16, fsdp, ...).",
        ),
    ] = None
    dtype: TrainingPrecision = "bfloat16"
    round_activations: RoundActivations = False
    as_json: Json = False


def expanded(command: Callable[[Any], None]) -> Callable[..., None]:
    """Turn a function of one dataclass of options into a function of its fields, as typer reads commands.

    Help shows first the fields without default, then those of the dataclass, then those of its base classes.
    """
    kind = get_type_hints(command)["options"]
    hints = get_type_hints(kind, include_extras=True)
    inherited = {name for base in kind.__mro__[1:] for name in inspect.get_annotations(base)}
    ordered = sorted(fields(kind), key=lambda field: (field.default is not MISSING, field.name in inherited))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(kind(**values))

    run.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name],
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in ordered
    ])  # fmt: skip
    return run


# ------------------------------------------------------------------------------------------------- methods and places

EXPERIMENTAL = ("lookahead", "early_exit", "last_logits")
METHOD_NAMES = ("auto", "hybrid", "eagle", "dflash", "mtp", "medusa", "prompt_lookup", "token_recycling",
                *EXPERIMENTAL)  # fmt: skip
"""Values of `--method`: those that need no second model; see docs/choosing.md."""

METHODS = f"{', '.join(METHOD_NAMES[: -len(EXPERIMENTAL)])}; experimental: {', '.join(EXPERIMENTAL)}"
"""The same in words, for help."""

ALIASES = ("ngram",)
"""Further names of methods, which commands accept but do not list."""

ASSISTANT_METHOD = "draft_model"
"""Method that drafts with a smaller model, the assistant; `hf-specdec bench` is the only command that loads one."""

FROM_PYTHON = {
    "pard": ("an assistant model that no command can load", "Use it from Python: model.load_drafter(path_or_hub_id)."),
    "grammar": ("a logits processor with a grammar", "Pass one to generate() in Python, as logits_processor=."),
}
"""Methods with another part that no command loads: that part, and what to do instead."""

FORWARDS = {"kernels": "CPU kernels", "inductor": "inductor's programs", "cuda_graph": "captured graphs"}
"""Values of `SpeculationStats.forwards`, except `"eager"`, in words."""


def check_method_names(names: Iterable[str], others: Sequence[str] = (), *, assistant: bool = False) -> None:
    """Check names of methods, unless an installed package may have added some: then only the registry knows them.

    The command also accepts `others`, which its help lists before `METHOD_NAMES`.
    """
    listed = (*others, *METHOD_NAMES)
    for name in names:
        if name in FROM_PYTHON:
            part, hint = FROM_PYTHON[name]
            raise DrafterMismatchError(f"The method {name!r} needs {part}.", hint)
        if name == ASSISTANT_METHOD and not assistant:
            raise DrafterMismatchError(
                f"The method {name!r} needs an assistant model, but none is given.",
                "Use hf-specdec bench with --assistant PATH_OR_HUB_ID.",
            )
        if name not in (*listed, *ALIASES, ASSISTANT_METHOD) and not entry_points(group=ENTRY_POINTS):
            raise unknown_method(name, listed)


def check_places(
    model: str | None = None, head: str | None = None, data: Iterable[str] = (), *, round_activations: bool = False
) -> None:
    """Check that the directories and files which a user names exist; a name that may be a Hub id is accepted.

    With `round_activations`, the model must be a GGUF file.
    """
    if round_activations and (model is None or not is_gguf(model)):
        raise InvalidConfigError(
            "--round-activations is for a target in a GGUF file.", "Give --model FILE.gguf, or drop it."
        )
    if model is not None:
        model_directory(model)
    if head is not None:
        head_directory(head)
    for source in data:
        records.existing_path(source)


# ----------------------------------------------------------------------------------------------- packages and files


def require_package(name: str, purpose: str, extra: str) -> None:
    """Check that an optional package is installed, which an extra of hf-specdec would install."""
    if importlib.util.find_spec(name) is None:
        raise InvalidConfigError(f"{purpose} needs the package {name}.", f"Run: pip install 'hf-specdec[{extra}]'")


def check_writable_file(path: Path | None, option: str, *, force: bool) -> None:
    """Check that the file given for an option can be written later, and does not exist unless `force` is true."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir() or not folder.is_dir():
        what = "is a directory" if path.is_dir() else f"is in a directory that does not exist: {folder}"
        raise InvalidConfigError(f"{option} {path} {what}.", "Give a file in an existing directory.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidConfigError(f"{option} {path} cannot be written.", "Check its permissions or give another file.")
    if path.exists() and not force:
        raise InvalidConfigError(f"{option} {path} already exists.", "Give another name or --force.")


PICTURE_FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path | None, extra: str, *, force: bool) -> None:
    """Check that a plot can be drawn, with matplotlib from an extra, and written to the file given for `--plot`."""
    if path is None:
        return
    require_package("matplotlib", "--plot", extra)
    check_writable_file(path, "--plot", force=force)
    if path.suffix not in PICTURE_FORMATS:
        raise InvalidConfigError(f"--plot {path} has an unknown suffix.", f"Use one of {', '.join(PICTURE_FORMATS)}.")


def check_writable_directory(path: Path | None, option: str) -> None:
    """Check that the directory given for an option can be created or written to."""
    if path is None:
        return
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        what = "is a file" if existing == path else f"cannot be created, because {existing} is a file"
        raise InvalidConfigError(f"{option} {path} {what}.", "Give a directory.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidConfigError(f"{option} {path}: {existing} is not writable.", "Give another directory.")


OBJECT_EXAMPLES = {
    "--arguments": '{"bf16": true}', "--recipe": '{"answer_tokens": 64}', "--head-fields": '{"num_draft_tokens": 8}',
}  # fmt: skip
"""A valid object for each option that takes one; the fields are those of every kind of head."""


def read_object_option(value: str | None, option: str) -> dict[str, Any]:
    """Return the JSON object given for an option, or that in the file given; {} if none is given."""
    if value is None:
        return {}
    try:
        return records.record_of(value, "it") if value.startswith("{") else records.read_json(Path(value))
    except InvalidConfigError as error:
        reason = str(error).removesuffix(" Expected a JSON object.")
        raise InvalidConfigError(
            f"{option}: {reason}", f"Expected a JSON object such as {OBJECT_EXAMPLES[option]}."
        ) from error
