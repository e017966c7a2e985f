"""What is known of a head before it is used: `hf-specdec inspect`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_specdec.checkpoints.formats import read_head
from hf_specdec.checkpoints.hub import open_checkpoint
from hf_specdec.checkpoints.layouts import LAYOUTS
from hf_specdec.verification.features import LAST


@dataclass(frozen=True, slots=True)
class HeadReport:
    """One head, read and checked."""

    where: str
    layout: str  # a name of `checkpoints/layouts.py`
    writers: str  # who writes that layout
    method: str  # for `speculative=`
    head: str  # class
    target: str | None  # the model that it names
    parameters: int
    dtype: str
    files: dict[str, int]  # names and bytes
    vocabulary: int | None  # V of the target
    draft_vocabulary: int | None  # Vd
    layers_read: list[int] | None  # of the target's hidden states; -1 is behind the final norm, None the paper's three
    config: dict[str, Any]  # what differs from the defaults of its class

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def inspect_head(repo_or_path: str | Path, **kwargs: Any) -> HeadReport:
    """Read a head and say what it is.

    Args:
        repo_or_path: A local directory or a Hub id.
        **kwargs: Arguments of `open_checkpoint`: `revision`, `token`, `subfolder`, ...

    Raises:
        CheckpointFormatError: It cannot be loaded.
    """
    checkpoint = open_checkpoint(repo_or_path, **kwargs)
    head = read_head(checkpoint.fields, checkpoint.files, checkpoint.where)
    config = head.config
    layers = getattr(config, "eagle_aux_hidden_state_layer_ids", [LAST])
    return HeadReport(
        where=checkpoint.where,
        layout=head.layout,
        writers=next(layout.writers for layout in LAYOUTS if layout.name == head.layout),
        method=head.method,
        head=type(head).__name__,
        target=config.base_model_name_or_path,
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        dtype=str(head.dtype).removeprefix("torch."),
        files={file.name: file.stat().st_size for file in checkpoint.files.files},
        vocabulary=config.vocab_size,
        draft_vocabulary=config.draft_vocab_size,
        layers_read=layers,
        config={
            name: value for name, value in config.to_diff_dict().items() if name not in HIDDEN and value is not None
        },
    )


HIDDEN = ("transformers_version", "architectures", "dtype", "_name_or_path", "recipe", "tau", "model_type",
          "base_model_name_or_path", "vocab_size", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")  # fmt: skip
"""Fields of a configuration that a report has in other places, or that say nothing of the head."""
