"""Stand-in for the packed weights of GGUF files: keeps the blocks, dequantises for every operation."""

from __future__ import annotations

from typing import Any

import torch
from gguf import GGMLQuantizationType, dequantize
from torch.utils._pytree import tree_map_only

_KINDS = ("Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q6_K")


class PackedWeight(torch.Tensor):
    """A weight `[N, K]` in the blocks of a GGUF file."""

    @staticmethod
    def supports(kind: str, rows: int, size: int) -> bool:
        """Whether a matrix `[rows, size]` of this kind can stay packed."""
        return kind in _KINDS and rows % 16 == 0

    @classmethod
    def from_gguf(
        cls, blocks: torch.Tensor, kind: str, dtype: torch.dtype, round_activations: bool = False
    ) -> PackedWeight:
        """Copy blocks `[N, bytes per row]`."""
        return cls._of(blocks.clone(), kind, dtype)

    @classmethod
    def _of(cls, blocks: torch.Tensor, kind: str, dtype: torch.dtype) -> PackedWeight:
        shape = dequantize(blocks[:1].numpy(), GGMLQuantizationType[kind]).shape[1]
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, (len(blocks), shape), dtype=dtype, device=torch.device("cpu")
        )
        made.blocks, made.kind = blocks, kind
        return made

    def dequantize(self) -> torch.Tensor:
        """Return the values."""
        kept: Any = self
        values = dequantize(kept.blocks.numpy(), GGMLQuantizationType[kept.kind])
        return torch.from_numpy(values).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedWeight({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Dequantise, except for `detach`."""
        if func is torch.ops.aten.detach.default:
            return cls._of(args[0].blocks, args[0].kind, args[0].dtype)
        args, kwargs = tree_map_only(PackedWeight, PackedWeight.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)
