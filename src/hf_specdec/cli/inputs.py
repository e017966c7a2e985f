"""Checks of names and paths that need neither torch nor transformers, so that mistakes in them are shown at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points

from hf_specdec.checkpoints.sources import head_directory, model_directory
from hf_specdec.config import COMBINED, ENTRY_POINTS
from hf_specdec.records import existing_path
from hf_specdec.validation import unknown_method

OWN_METHODS = (
    *COMBINED, "eagle", "dflash", "mtp", "medusa", "prompt_lookup", "ngram", "token_recycling", "lookahead",
    "early_exit", "last_logits", "draft_model", "pard",
)  # fmt: skip
"""Names and aliases of the methods of this package, which `drafters.registry` has as well."""

TRANSFORMERS_METHODS = ("plain", "transformers_prompt_lookup", "transformers_assisted", "plain_static_compiled")
"""The methods of transformers that `hf-specdec bench` measures, `bench.PEERS`."""


def check_methods(names: Iterable[str], others: Sequence[str] = ()) -> None:
    """Check names of methods, unless an installed package may have added some: then only the registry knows them.

    Args:
        names: Values of `--method`.
        others: Further names that the command accepts.

    Raises:
        InvalidConfigError: A name is unknown.
    """
    known = {*OWN_METHODS, *others}
    for name in names:
        if name not in known and not entry_points(group=ENTRY_POINTS):
            raise unknown_method(name, known)


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
