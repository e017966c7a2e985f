"""Write heads in the layouts of inference engines and of the methods' authors, with a model card.

A head is written atomically and overwrites another one only on request. The layouts are described in `engines.py` and
`block_engines.py`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_specdec.atomic import staging_directory
from hf_specdec.checkpoints.block_engines import BLOCK_FORMATS
from hf_specdec.checkpoints.directories import check_new_head
from hf_specdec.checkpoints.engines import FORMATS, Format
from hf_specdec.checkpoints.formats import Head
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.heads.base import NATIVE_LAYOUT
from hf_specdec.heads.card import CARD_NAME, export_card
from hf_specdec.records import path_of

logger = logging.getLogger(__name__)


def export_head(head: Head, path: str | Path, format: str = NATIVE_LAYOUT, *, replace: bool = False) -> Path:
    """Write a head in an engine's layout, with a card that describes how to use it there.

    Settings that the format cannot store are lost; their names are logged.

    Args:
        head: Any head of this package.
        path: A directory that is empty or does not exist, or with `replace`, holds a head.
        format: `"hf-specdec"`; `"medusa"` (Medusa's code and Text Generation Inference), `"eagle"`, `"eagle3"` (the
            authors' code, vLLM), `"speculators"` (EAGLE-3 and block heads on vLLM), `"speculators-mtp"`, `"sglang"`
            (EAGLE-3), `"dflash"` (block heads for the authors' code, JetSpec, vLLM and SGLang).
        replace: Delete a head that is in the directory, with all its files, and write this one.

    Returns:
        The directory.

    Raises:
        InvalidConfigError: The format is unknown; or the directory is the one the head was loaded from, is not empty
            (without `replace`), holds other files than a head's, or another process writes to it.
        CheckpointFormatError: The format cannot store this head, or the head needs an adapter. Nothing is written.

    Example:
        ```python
        export_head(load_head("org/head"), "out", format="speculators")
        ```
    """
    folder = path_of(path)
    _check_format(head, format)
    _check_directory(head, folder, replace)
    with staging_directory(folder) as staged:
        _write(head, staged / "new", format)
        if replace and folder.exists():
            folder.rename(staged / "old")
        try:
            (staged / "new").rename(folder)
        except OSError as error:
            if not folder.is_dir() or not any(folder.iterdir()):
                if (staged / "old").exists() and not folder.exists():
                    (staged / "old").rename(folder)
                raise
            raise InvalidConfigError(
                f"Another process wrote files into {folder} during the export.", "Choose another directory."
            ) from error
    lost = lost_settings(head, format)
    if lost:
        logger.info("%s: the format %r cannot store %s", folder, format, ", ".join(lost))
    return folder


OWN_SETTINGS = ("tree", "num_steps", "top_k", "num_draft_tokens", "all_children", "recipe", "tau")
"""Config fields with drafting defaults and training information, which do not define the head."""


def lost_settings(head: Head, format: str) -> list[str]:
    """Return the names of settings of a head that a format cannot store; loading the export gives their defaults."""
    if format == NATIVE_LAYOUT:
        return []
    defaults, holds = type(head.config)(), _rules(head, format).holds
    return [
        name for name in OWN_SETTINGS
        if name not in holds and getattr(head.config, name, None) not in (None, getattr(defaults, name, None))
    ]  # fmt: skip


def _rules(head: Head, format: str) -> Format:
    """Return how a format stores a kind of head.

    Raises:
        InvalidConfigError: The format is unknown.
        CheckpointFormatError: The format is for other heads.
    """
    found = [table[format] for table in (FORMATS, BLOCK_FORMATS) if format in table]
    if not found:
        known = dict.fromkeys((NATIVE_LAYOUT, *FORMATS, *BLOCK_FORMATS))
        raise InvalidConfigError(f"Unknown format {format!r}.", f"Known: {', '.join(known)}.")
    for rules in found:
        if isinstance(head, rules.head_class):
            return rules
    names = " or ".join(rules.head_class.__name__ for rules in found)
    own = {name for table in (FORMATS, BLOCK_FORMATS) for name, rules in table.items()
           if isinstance(head, rules.head_class)}  # fmt: skip
    raise CheckpointFormatError(
        f"The format {format!r} is for {names}, this is {type(head).__name__}.",
        f"Formats for heads of this kind: {', '.join((NATIVE_LAYOUT, *sorted(own)))}; some store fewer settings.",
    )


def _check_format(head: Head, format: str) -> None:
    if not isinstance(head, PreTrainedModel):
        way = "Pass its attribute `head`." if hasattr(head, "head") else "Load one with load_head()."
        raise InvalidConfigError(f"An export needs a head, got {type(head).__name__}.", way)
    if head.adapter is not None:
        raise CheckpointFormatError(
            f"The head {head.name_or_path} was trained together with an adapter of its target, which an export would "
            "lose.",
            "Copy its directory instead.",
        )
    ambiguity = head.ambiguity
    if ambiguity is not None and head.reading is None and ambiguity.open_fields:
        logger.warning(
            "The files of %s can be read in several ways, and the head was not loaded for a target: the documented "
            "reading is stored. To choose by a trial, export model.load_drafter(...).head.",
            head.name_or_path,
        )
    if format == NATIVE_LAYOUT:
        return
    reasons = [reason for reason, applies in _rules(head, format).refuse(head).items() if applies]
    if reasons:
        raise CheckpointFormatError(f"The format {format!r} cannot hold this head: {'; '.join(reasons)}.")


def _check_directory(head: Head, folder: Path, replace: bool) -> None:
    """Refuse to overwrite the head itself, another head (unless `replace`), or files that are not a head's."""
    if head.name_or_path and Path(head.name_or_path).resolve() == folder.resolve():
        raise InvalidConfigError(
            f"{folder} is the directory that this head was loaded from.", "Choose another directory."
        )
    check_new_head(folder, replace=replace)


def _write(head: Head, folder: Path, format: str) -> None:
    if format == NATIVE_LAYOUT:
        head.save_pretrained(folder)
        return
    rules = _rules(head, format)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in rules.tensors(head).items()}
    dtype = str(head.dtype).removeprefix("torch.")
    config = {**rules.config(head), "dtype": dtype, "torch_dtype": dtype}  # transformers renamed torch_dtype to dtype
    folder.mkdir()
    save_file(tensors, folder / rules.file_name, metadata={"format": "pt"})
    if format == "medusa":  # Medusa's own loaders read only .pt files
        torch.save(tensors, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / CARD_NAME).write_text(export_card(head.config, format, rules.readers(head)))
