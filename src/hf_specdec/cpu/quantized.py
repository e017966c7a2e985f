"""Quantised weights that the CPU kernels read as they are stored: GGUF blocks, and those of torchao and quanto."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, functional
from torch.utils._pytree import tree_map

from hf_specdec.cpu.operations import (
    BLOCKS,
    DTYPES,
    GROUPED,
    INT8,
    INT8_ROUNDED,
    NO_ACTIVATION,
    PACKED,
    can_multiply,
    define_operations,
    grouped_form,
    is_rounded,
    pack_blocks,
)
from hf_specdec.errors import UnsupportedModelError

UNPACKED = "Unpack the file instead: AutoModelForCausalLM.from_pretrained(directory, gguf_file=name)."
"""Hint of errors."""
TILE = 16
"""The number of rows must be divisible by it: packed.h holds 4, 8 or 16 rows side by side."""


class PackedWeight(Tensor):
    """A weight `[N, K]` in blocks of 4 to 8 bits, with a scale for each.

    `functional.linear`, `functional.embedding` and indexing of rows read the blocks. Everything else that torch can do
    with a tensor sees `dequantize()`, a new one. It lies on the CPU, and gets no gradients.

    Raises:
        UnsupportedModelError: It is written to, moved to another device, saved by `save_pretrained`, or shared.

    Attributes:
        blocks: uint8 `[N, bytes of a row]`, as packed.h lays them out.
        form: How the kernels multiply them, see `operations.PACKED`.
    """

    blocks: Tensor
    form: int

    def __new__(cls, blocks: Tensor, size: int, form: int, dtype: torch.dtype) -> PackedWeight:
        """Return a weight with K = `size`."""
        define_operations()
        shape = (len(blocks), size)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=blocks.device)
        made.blocks, made.form = blocks, form
        return made

    @staticmethod
    def supports(kind: str, rows: int, size: int) -> bool:
        """Whether a weight `[rows, size]` in blocks of a kind, such as `"Q4_K"`, can stay packed."""
        return kind in BLOCKS and rows % TILE == 0 and size % BLOCKS[kind].numbers == 0

    @classmethod
    def from_gguf(cls, blocks: Tensor, kind: str, dtype: torch.dtype, round_activations: bool = False) -> PackedWeight:
        """Return a weight with a copy of a file's blocks, laid out for the kernels.

        Args:
            blocks: uint8 `[N, bytes of a row]`, as in the file; may be a memory map.
            kind: A kind that `supports` knows.
            dtype: bfloat16 or float32, in which products are computed.
            round_activations: Round what it is multiplied with to int8, 32 numbers at a time.
        """
        form = PACKED + 2 * list(BLOCKS).index(kind) + round_activations
        size = blocks.shape[1] // BLOCKS[kind].in_file * BLOCKS[kind].numbers
        return cls(pack_blocks(form, blocks.contiguous()), size, form, dtype)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the blocks."""
        return self.blocks.nbytes

    def dequantize(self) -> Tensor:
        """Return the weight `[N, K]` in its dtype."""
        return self.rows(torch.arange(len(self), device=self.device))

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `[*ids, K]` in its dtype."""
        found: Tensor = torch.ops.hf_specdec_cpu.unpack(self.blocks, ids, self.form, self.dtype)
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        """Name kind, shape and dtype."""
        kind = list(BLOCKS)[(self.form - PACKED) // 2]
        return f"PackedWeight({kind}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Read the blocks, if that can be done."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # only `__torch_dispatch__` decides what stays packed
            found = _READING[func](*args, **kwargs) if func in _READING else NotImplemented
            return func(*args, **kwargs) if found is NotImplemented else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Keep the blocks in another tensor, or compute with the dequantised weight."""
        kwargs = kwargs or {}
        if func in _KEEPING:
            weight, dtype = args[0], kwargs.get("dtype") or args[0].dtype
            if torch.device(kwargs.get("device") or "cpu").type != "cpu":
                raise UnsupportedModelError(f"GGUF blocks stay on the CPU, not on {kwargs['device']}.", UNPACKED)
            if dtype in DTYPES:
                return cls(weight.blocks, weight.shape[1], weight.form, dtype)
        if args and isinstance(args[0], cls) and func._schema.is_mutable:
            _no_writing()
        args, kwargs = tree_map(lambda one: one.dequantize() if isinstance(one, cls) else one, (args, kwargs))
        return func(*args, **kwargs)


def _no_writing(*_: Any) -> Any:
    raise UnsupportedModelError("Weights in GGUF blocks cannot be written to.", UNPACKED)


def _no_storage(*_: Any) -> Any:
    raise UnsupportedModelError("Weights in GGUF blocks cannot be saved as tensors, nor shared.", UNPACKED)


def _set_data(weight: Any, value: Any) -> None:
    are_packed = isinstance(weight, PackedWeight) and isinstance(value, PackedWeight)
    if not are_packed or value.blocks is not weight.blocks:  # only the dtype may differ
        raise UnsupportedModelError(f"Weights in GGUF blocks cannot become another tensor ({value.dtype}).", UNPACKED)
    Tensor.data.__set__(weight, value)  # type: ignore[attr-defined]


def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Any:  # as torch calls it
    learns = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
    stored = None if learns or input.dtype != weight.dtype else stored_weight(weight)
    if stored is None or not can_multiply(input, stored.numbers, bias, stored.form):
        return NotImplemented
    return torch.ops.hf_specdec_cpu.linear(input, [stored.numbers], [bias], NO_ACTIVATION, None, None, stored.form)


def _embedding(
    input: Tensor, weight: Any, padding_idx: int | None = None, max_norm: float | None = None,
    *_others: Any, **_more: Any,
) -> Any:  # fmt: skip
    return weight.rows(input) if isinstance(weight, PackedWeight) and max_norm is None else NotImplemented


def _getitem(weight: Any, index: Any) -> Any:
    if not (isinstance(weight, PackedWeight) and isinstance(index, Tensor) and index.dtype == torch.long):
        return NotImplemented
    return weight.rows(torch.where(index < 0, index + len(weight), index))


_READING: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear, functional.embedding: _embedding, Tensor.__getitem__: _getitem,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.untyped_storage: _no_storage, Tensor.storage: _no_storage, Tensor.data_ptr: _no_storage,
    Tensor.share_memory_: _no_storage, Tensor.__setitem__: _no_writing,
}  # fmt: skip
_KEEPING = {
    torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}  # fmt: skip


def packed_forms(model: Module) -> dict[str, list[int]]:
    """Return the forms of a model's packed weights as `{"packed": [...]}`, `{}` if it has none.

    They identify a target: rounding what is multiplied with them changes hidden states and answers.
    """
    forms = {weight.form for weight in model.parameters() if isinstance(weight, PackedWeight)}
    return {"packed": sorted(forms)} if forms else {}


def packed_like(module: Any, target: Module) -> Any:
    """Return a module (or None) that drafts for a target: a copy in 8-bit blocks if the target's weights are packed.

    Reading weights is most of what a draft costs, and rounding them changes drafts only, no answer. The copy shares
    all tensors but the weights of its linear layers; those whose sizes no blocks fit are shared as well.
    """
    forms = packed_forms(target).get("packed")
    if module is None or not forms:
        return module
    round_activations = any(map(is_rounded, forms))
    memo: dict[int, Any] = {id(one): one for one in (*module.parameters(), *module.buffers())}
    for layer in module.modules():
        weight = layer.weight if isinstance(layer, Linear) else None
        if type(weight) is Parameter and PackedWeight.supports("Q8_0", *weight.shape):
            packed = PackedWeight.from_gguf(_q8_blocks(weight), "Q8_0", weight.dtype, round_activations)
            memo[id(weight)] = Parameter(packed, requires_grad=False)
    return copy.deepcopy(module, memo)


def _q8_blocks(weight: Tensor) -> Tensor:
    """Return a weight `[N, K]` as blocks of Q8_0: a scale in float16 and 32 numbers in int8 each."""
    values = weight.detach().float().unflatten(1, (-1, 32))
    scale = (values.abs().amax(-1, keepdim=True) / 127).half()
    numbers = (values / scale.float().where(scale > 0, 1.0)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], dim=-1).flatten(1)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The parts of a quantised weight that `operations.linear` takes."""

    numbers: Tensor  # int8 `[N, K]`, or `[N, K / 2]` of 4 bits, or blocks as packed.h lays them out
    scale: Tensor | None  # float32 `[N]`, or `[N, groups, 2]` with offsets; None for blocks
    form: int


def stored_weight(weight: Any) -> StoredWeight | None:
    """Return the parts of a quantised weight that the kernels can multiply; None for all others."""
    kind = type(weight)
    if isinstance(weight, PackedWeight):
        return StoredWeight(weight.blocks, None, weight.form)
    if kind.__name__ == "Int8Tensor" and kind.__module__.startswith("torchao."):
        rows, form = weight.act_quant_kwargs, INT8
        if rows is not None:
            is_plain = rows.mapping_type.name == "SYMMETRIC" and type(rows.granularity).__name__ == "PerRow"
            if not is_plain or rows.reduce_range:
                return None
            form = INT8_ROUNDED
        if weight.act_pre_scale is not None or weight.act_quant_scale is not None:
            return None
        numbers, scale, shift = weight.qdata, weight.scale, weight.zero_point
        if (
            numbers.dim() != 2
            or list(weight.block_size) != [1, numbers.shape[1]]
            or (shift is not None and shift.any())
        ):
            return None
    elif kind.__name__ == "WeightQBytesTensor" and kind.__module__.startswith("optimum.quanto."):
        numbers, scale, form = weight._data, weight._scale, INT8
        if numbers.dtype != torch.int8 or weight.axis != 0 or weight.activation_qtype is not None:
            return None
    elif kind.__name__ == "IntxUnpackedToInt8Tensor" and kind.__module__.startswith("torchao."):
        rounding, scale = weight.activation_quantization, weight.scale.float()
        if rounding not in (None, "int8_asym_per_token") or weight.block_size[0] != 1:
            return None
        return _grouped(weight, weight.qdata, scale, -scale * weight.zero_point, rounding is not None, halves=False)
    elif kind.__name__ == "WeightQBitsTensor" and kind.__module__.startswith("optimum.quanto."):
        if weight.qtype.name != "qint4" or weight.axis != 0 or len(weight) % 2:
            return None
        scale, shift = weight._scale.float(), weight._shift.float()
        offset = -shift if weight._shift.is_floating_point() else -shift * scale
        return _grouped(weight, weight._data._data, scale, offset, rounded=False, halves=True)
    else:
        return None
    return StoredWeight(numbers, scale.detach().float().flatten(), form) if scale.numel() == len(numbers) else None


def _grouped(
    weight: Any, numbers: Tensor, scale: Tensor, offset: Tensor, rounded: bool, halves: bool
) -> StoredWeight | None:
    """Return a weight of numbers times their group's scale plus its offset; None if its groups are too small."""
    table = torch.stack([scale.detach().flatten(), offset.detach().flatten()], dim=-1).view(len(weight), -1, 2)
    size = weight.numel() // table[..., 0].numel()
    part = size & -size  # the kernels read groups of 2 ** n numbers
    form = grouped_form(part, rounded, halves)
    if weight.dim() != 2 or form < GROUPED:
        return None
    table = table.repeat_interleave(size // part, dim=1)
    return StoredWeight(numbers.view(torch.int8).view(len(weight), -1), table, form)
