"""From a head to the layouts of engines and of the authors, in a directory of its own, with a card.

A head is written whole, beside its place first; nothing of another one stays, and none is written over unasked. The
layouts are the table of `heads/engines.py`.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_specdec.atomic import staging_directory
from hf_specdec.checkpoints.engines import FORMATS
from hf_specdec.checkpoints.files import listed
from hf_specdec.checkpoints.formats import Head
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.heads.base import NATIVE_LAYOUT
from hf_specdec.heads.card import CARD_NAME, export_card

logger = logging.getLogger(__name__)


def export_head(head: Head, path: str | Path, format: str = NATIVE_LAYOUT, *, replace: bool = False) -> Path:
    """Write a head in the layout of an engine, with a card that names who reads it.

    Args:
        head: Any head of this package.
        path: A directory that is empty or not there yet.
        format: `"hf-specdec"`; `"medusa"` (Medusa's code and Text Generation Inference), `"eagle"`, `"eagle3"` (the
            authors' code, vLLM), `"speculators"` (EAGLE-3 on vLLM), `"speculators-mtp"`, `"sglang"` (EAGLE-3).
        replace: Put it in the place of another head; nothing of that one stays.

    Returns:
        The directory. Whatever the format has no place for is said in the log, see `lost_settings`.

    Raises:
        InvalidConfigError: No such format, the directory that the head was read from, or one that holds something.
        CheckpointFormatError: The format is for other heads, or cannot hold something this head has; nothing is
            written then.
    """
    folder = Path(path)
    _check_format(head, format)
    _check_place(head, folder, replace)
    with staging_directory(folder) as made:
        _write(head, made / "new", format)
        if replace and folder.exists():
            folder.rename(made / "old")
        try:
            (made / "new").rename(folder)
        except OSError as error:
            if not folder.is_dir() or not any(folder.iterdir()):
                raise
            raise InvalidConfigError(f"Something else was written into {folder} meanwhile.", "Look at it.") from error
    lost = lost_settings(head, format)
    if lost:
        logger.info("%s: the format %r has no place for %s", folder, format, ", ".join(lost))
    return folder


OWN_SETTINGS = ("tree", "num_steps", "top_k", "num_draft_tokens", "recipe", "tau")
"""Fields of a head's config that say how it drafts and what is known of it, not what it is."""

HEAD_FILES = re.compile(
    r"config\.json|.+\.(safetensors|bin|pt)(\.index\.json)?|README\.md|[\w-]+\.png|custom_generate(/generate\.py)?"
)
"""What a head's directory may hold to be replaced as a whole."""


def lost_settings(head: Head, format: str) -> list[str]:
    """The settings of a head that a format has no place for; they are the drafter's defaults when it is read again.

    Args:
        head: The head.
        format: As for `export_head`.
    """
    if format == NATIVE_LAYOUT:
        return []
    defaults, holds = type(head.config)(), FORMATS[format].holds
    return [
        name for name in OWN_SETTINGS
        if name not in holds and getattr(head.config, name, None) not in (None, getattr(defaults, name, None))
    ]  # fmt: skip


def _check_format(head: Head, format: str) -> None:
    if format == NATIVE_LAYOUT:
        return
    if format not in FORMATS:
        raise InvalidConfigError(
            f"There is no format {format!r}.", f"There are: {NATIVE_LAYOUT}, {', '.join(FORMATS)}."
        )
    rules = FORMATS[format]
    if not isinstance(head, rules.head_class):
        raise CheckpointFormatError(
            f"The format {format!r} is for {rules.head_class.__name__}, this is {type(head).__name__}."
        )
    reasons = [reason for reason, applies in rules.refuse(head).items() if applies]
    if reasons:
        raise CheckpointFormatError(f"The format {format!r} cannot hold this head: {'; '.join(reasons)}.")


def _check_place(head: Head, folder: Path, replace: bool) -> None:
    """Nothing is written over that was not meant: not the head itself, not another, nothing that is not a head."""
    if head.name_or_path and Path(head.name_or_path).resolve() == folder.resolve():
        raise InvalidConfigError(f"{folder} is where this head was read from: it would be lost.", "Give another one.")
    there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.is_dir() else []
    if there and not replace:
        raise InvalidConfigError(
            f"{folder} is not empty: it holds {listed(there)}.", "Give a new directory; or replace=True (--force)."
        )
    strange = [name for name in there if not HEAD_FILES.fullmatch(name)]
    if strange:
        raise InvalidConfigError(f"{folder} holds {listed(strange)}, which no head has.", "Give another directory.")


def _write(head: Head, folder: Path, format: str) -> None:
    if format == NATIVE_LAYOUT:
        head.save_pretrained(folder)
        return
    rules = FORMATS[format]
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in rules.tensors(head).items()}
    dtype = str(head.dtype).removeprefix("torch.")
    config = {**rules.config(head), "dtype": dtype, "torch_dtype": dtype}  # the new name and the old one
    folder.mkdir()
    save_file(tensors, folder / rules.file_name, metadata={"format": "pt"})
    if format == "medusa":  # Medusa's own loaders know only this one; ours and TGI's read the other
        torch.save(tensors, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / CARD_NAME).write_text(export_card(head.config, format, rules.readers(head)))
