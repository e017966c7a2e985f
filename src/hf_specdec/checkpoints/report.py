"""Reports on heads, for `hf-specdec inspect`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_specdec.checkpoints.formats import ALL_LAYOUTS, read_head
from hf_specdec.checkpoints.hub import open_checkpoint
from hf_specdec.verification.features import LAST


@dataclass(frozen=True, slots=True)
class HeadReport:
    """Properties of a head that can be loaded."""

    where: str
    layout: str  # name in `checkpoints/layouts.py`
    writers: str  # programs that write the layout
    method: str  # for `speculative=`
    head: str  # class name
    target: str | None  # according to its config
    parameters: int  # number of weights
    dtype: str
    files: dict[str, int]  # sizes in bytes by name
    vocabulary: int | None  # V of the target
    draft_vocabulary: int | None  # Vd
    layers_read: list[int] | None  # numbers of hidden states, see `Features`; None: the authors' default
    ambiguous: list[str]  # fields of `Reading` that the files leave open
    needs_adapter: bool  # whether the head was trained together with an adapter of its target
    config: dict[str, Any]  # fields with other values than the defaults of the class
    in_card: list[str]  # long fields of the config that are stored, but only shown in the model card

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return asdict(self)


def inspect_head(repo_or_path: str | Path, **kwargs: Any) -> HeadReport:
    """Load a head and report its properties.

    Args:
        repo_or_path: A local directory or a Hub id.
        **kwargs: Arguments of `open_checkpoint`: `revision`, `token`, `subfolder`, ...

    Raises:
        CheckpointFormatError: The head cannot be loaded; a `HeadTensorsError` if its tensors do not fit its config.
    """
    checkpoint = open_checkpoint(repo_or_path, **kwargs)
    head = read_head(checkpoint.fields, checkpoint.files, checkpoint.where)
    config = head.config
    names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    layers = next((getattr(config, name) for name in names if hasattr(config, name)), [LAST])
    return HeadReport(
        where=checkpoint.where,
        layout=head.layout,
        writers=next(layout.writers for layout in ALL_LAYOUTS if layout.name == head.layout),
        method=head.method,
        head=type(head).__name__,
        target=config.base_model_name_or_path,
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        dtype=str(head.dtype).removeprefix("torch."),
        files={file.name: file.stat().st_size for file in checkpoint.files.files},
        vocabulary=config.vocab_size,
        draft_vocabulary=config.draft_vocab_size,
        layers_read=layers,
        ambiguous=[] if head.ambiguity is None else head.ambiguity.open_fields,
        needs_adapter=checkpoint.adapter is not None,
        config={
            name: value
            for name, value in config.to_diff_dict().items()
            if name not in (*HIDDEN, *IN_CARD) and value is not None
        },
        in_card=[name for name in IN_CARD if getattr(config, name, None) is not None],
    )


IN_CARD = ("recipe", "tau")
"""Config fields that the model card shows: how the head was trained, and what was measured."""

HIDDEN = ("transformers_version", "architectures", "dtype", "_name_or_path", "model_type", "base_model_name_or_path",
          "vocab_size", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids",
          "aux_hidden_state_layer_ids")  # fmt: skip
"""Config fields that are left out of `HeadReport.config`: reported elsewhere, or irrelevant."""
