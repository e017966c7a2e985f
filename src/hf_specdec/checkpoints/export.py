"""Write heads in the layouts of inference engines and of the methods' authors, with a model card.

A head is written atomically and overwrites another one only on request. The layouts are the rows of
`checkpoints/formats.py` that have a `format`.
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.atomic import staging_directory
from hf_specdec.checkpoints.formats import LAYOUTS, Head
from hf_specdec.checkpoints.layout import Layout
from hf_specdec.checkpoints.sources import check_new_head
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.heads.card import CARD_NAME, export_card
from hf_specdec.heads.head import NATIVE_LAYOUT
from hf_specdec.records import checked_path
from hf_specdec.verification.model import lm_head_rows

logger = logging.getLogger(__name__)


def export_head(
    head: Head,
    path: str | Path,
    format: str = NATIVE_LAYOUT,
    *,
    replace: bool = False,
    target: PreTrainedModel | None = None,
) -> Path:
    """Write a head in an engine's layout, with a card that describes how to use it there.

    Settings that the format cannot store are lost; their names are logged.

    Args:
        head: Any head of this package.
        path: A directory that is empty or does not exist, or with `replace`, holds a head.
        format: `"hf-specdec"`; `"medusa"` (Medusa's code and Text Generation Inference), `"eagle"`, `"eagle3"` (the
            authors' code, vLLM), `"speculators"` (EAGLE-3 and block heads on vLLM), `"speculators-mtp"`, `"sglang"`
            (EAGLE-3), `"dflash"` (block heads for the authors' code, JetSpec, vLLM and SGLang).
        replace: Delete a head that is in the directory, with all its files, and write this one.
        target: The head's target. A head with a draft vocabulary that uses the target's lm_head is written with a copy
            of these rows, without which engines cannot load it.

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
    folder = checked_path(path)
    if target is not None and isinstance(head, PreTrainedModel):
        head = _with_lm_head(head, target)
    _check_format(head, format)
    if head.name_or_path and Path(head.name_or_path).resolve() == folder.resolve():
        raise InvalidConfigError(
            f"{folder} is the directory that this head was loaded from.", "Choose another directory."
        )
    check_new_head(folder, replace=replace)
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


OWN_SETTINGS = ("tree", "num_steps", "top_k", "num_draft_tokens", "all_children", "trained_length", "recipe", "tau")
"""Config fields with drafting defaults and training information, which do not define the head."""


def _with_lm_head(head: Head, target: PreTrainedModel) -> Head:
    """Return the head; one that uses the target's lm_head over a draft vocabulary, as a copy that has these rows."""
    head.check_sizes(target.config.get_text_config(decoder=True))
    if not head.shares_lm_head or head.hot_token_ids is None or not hasattr(head.config, "own_lm_head"):
        return head
    rows = lm_head_rows(target, head.hot_token_ids)
    if type(rows) is not nn.Linear or rows.bias is not None:
        raise CheckpointFormatError(
            "The target's lm_head is quantised, offloaded or sharded, or has a bias, so its rows cannot be copied.",
            "Load the target in its original precision, on one device.",
        )
    copied = copy.deepcopy(head)
    copied.lm_head, copied.shares_lm_head, copied.config.own_lm_head = rows.to(head.dtype), False, True
    return copied


def lost_settings(head: Head, format: str) -> list[str]:
    """Return the names of settings of a head that a format cannot store; loading the export gives their defaults."""
    if format == NATIVE_LAYOUT:
        return []
    defaults, holds = type(head.config)(), _row(head, format).holds
    return [
        name for name in OWN_SETTINGS
        if name not in holds and getattr(head.config, name, None) not in (None, getattr(defaults, name, None))
    ]  # fmt: skip


def _row(head: Head, format: str) -> Layout:
    """Return the layout in which a format stores a kind of head; refuse unknown formats and other heads."""
    found = [layout for layout in LAYOUTS if layout.format == format]
    if not format or not found:
        known = dict.fromkeys(layout.format for layout in LAYOUTS if layout.format)
        raise InvalidConfigError(
            f"Unknown format {format!r}.", f"Known: {', '.join((NATIVE_LAYOUT, *sorted(known)))}."
        )
    for layout in found:
        if isinstance(head, layout.head_class):
            return layout
    names = " or ".join(sorted(layout.head_class.__name__ for layout in found))
    own = sorted(layout.format for layout in LAYOUTS if layout.format and isinstance(head, layout.head_class))
    raise CheckpointFormatError(
        f"The format {format!r} is for {names}, this is {type(head).__name__}.",
        f"Formats for heads of this kind: {', '.join((NATIVE_LAYOUT, *own))}; some store fewer settings.",
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
    reasons = [reason for reason, applies in _row(head, format).refusals(head).items() if applies]
    if reasons:
        raise CheckpointFormatError(f"The format {format!r} cannot hold this head: {'; '.join(reasons)}.")


def _write(head: Head, folder: Path, format: str) -> None:
    if format == NATIVE_LAYOUT:
        head.save_pretrained(folder)
        return
    layout = _row(head, format)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in layout.written(head).items()}
    dtype = str(head.dtype).removeprefix("torch.")
    config = {**layout.config_of(head), "dtype": dtype, "torch_dtype": dtype}  # transformers renamed torch_dtype
    folder.mkdir()
    save_file(tensors, folder / layout.file_name, metadata={"format": "pt"})
    if format == "medusa":  # Medusa's own loaders read only .pt files
        torch.save(tensors, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / layout.file_name).chmod((folder / "config.json").stat().st_mode)  # safetensors' files are private
    (folder / CARD_NAME).write_text(export_card(head.config, format, layout.readers(head)))
