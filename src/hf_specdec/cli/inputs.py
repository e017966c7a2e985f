"""Checks of names and paths that need neither torch nor transformers, so that mistakes in them are shown at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points

from hf_specdec.checkpoints.sources import head_directory, model_directory
from hf_specdec.cli.options import METHOD_NAMES
from hf_specdec.config import ENTRY_POINTS
from hf_specdec.errors import DrafterMismatchError
from hf_specdec.records import existing_path
from hf_specdec.validation import unknown_method

ALIASES = ("ngram",)
"""Further names of methods, which commands accept but do not list."""

ASSISTANT_METHOD = "draft_model"
"""Method that drafts with a smaller model, the assistant; `hf-specdec bench` is the only command that loads one."""

FROM_PYTHON = {"pard": "Use it from Python: model.load_drafter(path_or_hub_id)."}
"""Methods with another part that no command loads, and what to do instead."""

TRANSFORMERS_METHODS = ("plain", "transformers_prompt_lookup", "transformers_assisted", "plain_static_compiled")
"""The methods of transformers that `hf-specdec bench` measures, `bench.PEERS`."""


def check_methods(names: Iterable[str], others: Sequence[str] = (), *, assistant: bool = False) -> None:
    """Check names of methods, unless an installed package may have added some: then only the registry knows them.

    Args:
        names: Values of `--method`.
        others: Further names that the command accepts; its help lists them before `METHOD_NAMES`.
        assistant: Whether the user has given an assistant model.

    Raises:
        InvalidConfigError: A name is unknown.
        DrafterMismatchError: A method needs an assistant model that is not given, or that the command cannot load.
    """
    listed = (*others, *METHOD_NAMES)
    for name in names:
        if name in FROM_PYTHON:
            raise DrafterMismatchError(
                f"The method {name!r} needs an assistant model that no command can load.", FROM_PYTHON[name]
            )
        if name == ASSISTANT_METHOD and not assistant:
            raise DrafterMismatchError(
                f"The method {name!r} needs an assistant model, but none is given.",
                "Use hf-specdec bench with --assistant PATH_OR_HUB_ID.",
            )
        if name not in (*listed, *ALIASES, ASSISTANT_METHOD) and not entry_points(group=ENTRY_POINTS):
            raise unknown_method(name, listed)


def check_places(model: str | None = None, head: str | None = None, data: Iterable[str] = ()) -> None:
    """Check that the directories and files which a user names exist; a name that may be a Hub id is accepted.

    Raises:
        CheckpointFormatError: The model or the head does not exist, or the model's directory has no config.
        InvalidConfigError: A source of data does not exist.
    """
    if model is not None:
        model_directory(model)
    if head is not None:
        head_directory(head)
    for source in data:
        existing_path(source)
