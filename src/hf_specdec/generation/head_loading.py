"""Load a head or a PARD assistant for a target.

The adapter that a head was trained with is checked, and it is decided how an ambiguous head is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.checkpoints.adapters import check_adapter
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.pard import PardDrafter
from hf_specdec.drafters.registry import check_drafter_name, drafter_of, methods
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.generation.assistant_loading import assistant_config, assistant_drafter
from hf_specdec.generation.reading_trial import choose_reading
from hf_specdec.heads.base import DraftHead
from hf_specdec.heads.readings import checked_reading
from hf_specdec.validation import check_names
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import text_config

OWN_OPTIONS = ("name", "verify", "reading")
"""Options of `load_drafter` that are not options of `load_head`."""


def head_drafter(
    model: PreTrainedModel, source: str | Path | DraftHead, reading: Mapping[str, Any] | None, tries_readings: bool,
    options: Mapping[str, Any], name: str | None = None,
) -> Drafter:  # fmt: skip
    """Load a head, choose its reading if its files allow several (*ambiguous*), and return its drafter.

    If the files are those of a PARD assistant, return its drafter instead.

    A loaded head whose reading has already been chosen keeps it unless `reading` is given. The drafter is bound to the
    target only if several readings are tried.

    Args:
        model: The target.
        source: A directory, a Hub id, or a loaded head.
        reading: Fields of a `Reading` that the caller sets; None for none.
        tries_readings: Whether an ambiguous head is tried in each reading, see `choose_reading`; otherwise the first
            one (the documented one) is used.
        options: Arguments of `load_head`, or of `assistant_drafter`; those that are None are left out.
        name: The name that the drafter is to get; None: that of its method.

    Raises:
        CheckpointFormatError, DrafterMismatchError: See `load_drafter`.
        InvalidConfigError: `reading` is invalid, or given for something other than an ambiguous head; options were
            given for a loaded head or are unknown; the `hot_tokens` in them are invalid; or `name` is another
            method's.
    """
    _check_arguments(source, name)
    wanted = checked_reading(reading or {})
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(source, DraftHead) and (fields := assistant_config(source, given)) is not None:
        if wanted:
            raise InvalidConfigError(f"`reading` is given, but {source} is a PARD assistant.", "Leave it out.")
        return assistant_drafter(model, source, fields, given)
    head = _head_of(source, given)
    if head.adapter is not None:  # before the trial; binding checks it again
        check_adapter(model, head.adapter)
    drafter = drafter_of(head)
    check_drafter_name(name or drafter.method, (drafter.method,))  # before the trial
    if head.ambiguity is None:
        if wanted:
            raise InvalidConfigError(
                f"`reading` is given, but a {type(head).__name__} in the layout {head.layout} has only one reading.",
                "Leave it out.",
            )
        return drafter
    config = text_config(model)
    if head.reading is not None and not wanted:
        return drafter
    readings = head.ambiguity.chosen(config, wanted)
    head.read_as(readings[0], config)
    if len(readings) > 1 and tries_readings:
        try:
            with persistent_tensors():
                drafter.bind(model)
            head.read_as(choose_reading(model, head, readings), config)
        except BaseException:
            head.read_as(readings[0], config)
            head.reading = None  # not chosen: the next call tries again
            raise
    return drafter


def _check_arguments(source: Any, name: str | None) -> None:
    """Refuse anything but a path, a Hub id or a head, and the names of methods that load no head."""
    if not isinstance(source, str | Path | DraftHead):
        raise CheckpointFormatError(
            f"`repo_or_path` must be a local directory, a Hub id or a loaded head, got {type(source).__name__}.",
            "A whole model is passed to generate() as `assistant_model=`.",
        )
    if name is not None:
        check_drafter_name(name, {PardDrafter.method, *(row.name for row in methods().values() if row.heads)})


def _head_of(source: str | Path | DraftHead, options: Mapping[str, Any]) -> Any:
    """Return the head at a source; one that is already loaded takes no options."""
    if not isinstance(source, DraftHead):
        known = [*OWN_OPTIONS, *list(inspect.signature(load_head).parameters)[1:]]
        check_names("load_drafter", options, known, kind="option")
        return load_head(source, **options)
    if options:
        raise InvalidConfigError(
            f"{', '.join(sorted(options))} are options for loading a head, but this {type(source).__name__} is "
            "already loaded.",
            "Leave them out, or pass its path or Hub id.",
        )
    return source
