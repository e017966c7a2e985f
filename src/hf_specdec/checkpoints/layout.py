"""A published layout of heads as a row of a table, and how a head is read by its row.

Sizes come from the tensors where possible, the rest from the config. The head is created on the meta device and
compared with the file before any memory is allocated, so a wrong config cannot exhaust memory.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_specdec.checkpoints.files import TensorFiles
from hf_specdec.errors import (
    CheckpointFormatError,
    HeadTensorsError,
    InvalidConfigError,
    SpeculativeDecodingError,
    listed,
)
from hf_specdec.heads.attention import DraftRotaryEmbedding
from hf_specdec.heads.layer_mtp import LayerMtpHead
from hf_specdec.heads.schema import MAX_VOCABULARY, checked
from hf_specdec.records import Fields, shortened

Names = frozenset[str]
Tensors = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VOCABULARIES = ("d2t", "token_map")
"""Names of the integer tensors, which define a draft vocabulary: offsets (`d2t`) or token ids (`token_map`)."""

LARGEST_WEIGHT = torch.finfo(torch.float16).max
"""Maximum absolute value of a weight: a head is converted to its target's dtype, which may be float16."""

ROTARY_BUFFER = r"(.*\.)?rotary_emb\.inv_freq"
"""A buffer that old versions of transformers saved; it is computed from the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to store a head: how it is recognised, where its fields and tensors are, and how it is written."""

    name: str
    head_class: Any
    writers: str  # programs that write it

    # ---- recognised by
    marks: Mapping[str, Any] = field(default_factory=dict)  # dotted path in config.json: value; `...` is any but null
    marked_by: tuple[str, ...] = ()  # regular expressions, each of which matches the name of a tensor
    unmarked_by: tuple[str, ...] = ()  # regular expressions that match none

    # ---- reading
    # our config, see `_empty_head`; None: it is stored unchanged
    settings_of: Callable[[Layout, Fields, Fields, Shapes], Fields] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)  # our field: dotted path in config.json
    fixed: Mapping[str, Any] = field(default_factory=dict)  # our field: value for all heads of this layout
    expected: Mapping[str, Any] = field(default_factory=dict)  # dotted path: the only supported value
    aliases: tuple[tuple[str, str], ...] = ()  # regular expression of a start: ours; the first that matches is used
    unread: tuple[str, ...] = (ROTARY_BUFFER,)  # regular expressions of tensors that are not loaded
    complete: Callable[[Fields, Tensors], Tensors] | None = None  # adds tensors that are left implicit, also on meta
    layer_config: str = ""  # path of the draft layer's config; "" is the top level
    of_verifier: bool = False  # the layer config is that of the whole target; its first layer type is used
    layer_ids: tuple[tuple[str, tuple[int, ...]], ...] = ()  # paths of layer ids, with their possible offsets
    is_strict: bool = False  # unknown fields of `dflash_config` are refused
    unsure_of_norm_output: bool = False  # `norm_output: true` may be wrong, see `heads/readings.py`

    # ---- both ways
    renames: tuple[tuple[str, str], ...] = ()  # start of a tensor's name there: ours; the first that matches is used

    # ---- writing
    format: str = ""  # name in `export_head`; "" if it is not written
    refusals: Callable[[Any], Mapping[str, bool]] = lambda head: {}  # reasons against a head, and whether each applies
    config_of: Callable[[Any], Fields] = lambda head: {}
    tensors_of: Callable[[Any], Tensors] = lambda head: head.state_dict()  # by our names, before `renames`
    readers: Callable[[Any], str] = lambda head: ""  # for the card: programs that read it, and how to use them
    file_name: str = "model.safetensors"
    holds: tuple[str, ...] = ()  # fields of `export.OWN_SETTINGS` that it can store

    def matches(self, fields: Fields, names: Names) -> bool:
        """Whether a checkpoint with this config and these tensor names is stored in this layout."""
        for path, wanted in self.marks.items():
            found = lookup(fields, path)
            if found is None or (wanted is not ... and found != wanted):
                return False
        return all(any(re.fullmatch(pattern, name) for name in names) for pattern in self.marked_by) and not any(
            re.fullmatch(pattern, name) for pattern in self.unmarked_by for name in names
        )

    def written(self, head: Any) -> Tensors:
        """Return a head's tensors by the names of this layout."""
        return {_replaced(name, ((ours, theirs) for theirs, ours in self.renames)): tensor
                for name, tensor in self.tensors_of(head).items()}  # fmt: skip


def _replaced(name: str, starts: Iterable[tuple[str, str]]) -> str:
    return next((new + name[len(old) :] for old, new in starts if name.startswith(old)), name)


def lookup(fields: Fields, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path of a config; of several paths, separated by "|", the first that exists.

    Example: `lookup({"medusa": {"n": [2]}}, "medusa.n.0")` is 2.
    """
    for alternative in path.split("|"):
        found: Any = fields
        for part in alternative.split("."):
            if isinstance(found, list):  # numbers are indices
                found = dict(zip("0123456789", found, strict=False))
            if not isinstance(found, dict) or part not in found:
                break
            found = found[part]
        else:
            return found
    return default


# ----------------------------------------------------------------------------------------------- reading a head


def read_by(layout: Layout, fields: Fields, files: TensorFiles, where: str) -> Any:
    """Create a head from a checkpoint in a known layout; see `formats.read_head`."""
    file_names, unread = _names_of(layout, files.shapes, where)
    head = assembled(
        lambda shapes: _empty_head(layout, fields, shapes), file_names, files, f"{where} (layout {layout.name})",
        lambda tensors: tensors if layout.complete is None else layout.complete(fields, tensors),
        next((name for name in unread if name.endswith("t2d")), None),
    )  # fmt: skip
    head.layout = layout.name
    return head


def assembled(
    make: Callable[[Shapes], Any], file_names: Mapping[str, str], files: TensorFiles, where: str,
    complete: Callable[[Tensors], Tensors], mask: str | None = None,
) -> Any:  # fmt: skip
    """Return a head with its tensors, on the CPU, in eval mode and in the smallest dtype that represents them all.

    `make` creates it on the meta device, given the shapes of its tensors; `file_names` are names in the files by our
    names; `complete` is that of `Layout`; `mask` is the name of the mask of the draft vocabulary (`t2d`) in the files.
    """
    with _named_errors(where):
        planned = complete({
            ours: torch.empty(
                files.shapes[name], dtype=torch.long if ours in VOCABULARIES else torch.float32, device="meta"
            )
            for ours, name in file_names.items()
        })  # fmt: skip
        shapes = {name: tuple(tensor.shape) for name, tensor in planned.items()}
        with torch.device("meta"):
            head = make(shapes)
    _check_shapes(head.state_dict(), shapes, file_names, where)
    stored = files.read(file_names.values())
    read = {ours: _copy(ours, name, stored[name], where) for ours, name in file_names.items()}
    tensors = {name: read[name] if name in read else _copy(name, name, tensor, where)
               for name, tensor in complete(read).items()}  # fmt: skip
    floats = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    dtype = functools.reduce(torch.promote_types, floats)
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    if "d2t" in tensors:
        selected = None if mask is None else files.read([mask])[mask]
        tensors = _in_vocabulary_order(tensors, selected, head.config.vocab_size, where)
    head.load_state_dict(tensors, assign=True)
    if hasattr(head, "rotary_emb"):  # its frequencies are computed, because checkpoints do not store them
        with _named_errors(where):
            if isinstance(head, LayerMtpHead):
                head.reset_rotary()
            else:
                with torch.device("cpu"):
                    head.rotary_emb = DraftRotaryEmbedding(head.config)
        scaling = getattr(head.rotary_emb, "attention_scaling", 1.0)
        finite = isinstance(scaling, int | float) and math.isfinite(scaling)
        if not finite or not bool(head.rotary_emb.inv_freq.isfinite().all()):
            raise CheckpointFormatError(f"{where}: its rope_parameters give no finite frequencies.")
    head.config.dtype = dtype
    return head.eval()


@contextmanager
def _named_errors(where: str) -> Iterator[None]:
    """Convert errors of creating a head, also of transformers and torch, to those of a checkpoint."""
    try:
        yield
    except HeadTensorsError as error:
        raise HeadTensorsError(f"{where}: {error}") from error
    except InvalidConfigError as error:
        raise CheckpointFormatError(f"{where}: its config is invalid: {error}") from error
    except SpeculativeDecodingError as error:
        raise CheckpointFormatError(f"{where}: {error}") from error
    except Exception as error:  # transformers' validation and torch raise many types
        reason = " ".join(str(error).split())[:300]
        raise CheckpointFormatError(f"{where}: its config is invalid: {type(error).__name__}: {reason}.") from error


def _names_of(layout: Layout, names: Iterable[str], where: str) -> tuple[dict[str, str], list[str]]:
    """Return the names in the files by our tensor names, and the names in the files that are not loaded."""
    file_names: dict[str, str] = {}
    unread = []
    for name in names:
        if any(re.fullmatch(pattern, name) for pattern in layout.unread):
            unread.append(name)
            continue
        ours = next(
            (found.expand(new) + name[found.end() :] for old, new in layout.aliases if (found := re.match(old, name))),
            None,
        )
        ours = _replaced(name, layout.renames) if ours is None else ours
        if ours in file_names:
            raise CheckpointFormatError(f"{where}: {file_names[ours]} and {name} both map to the tensor {ours}.")
        file_names[ours] = name
    # SGLang and TensorRT-LLM call the input norm of an EAGLE-3 layer after the first `hidden_norm`. Layers that also
    # read the token embedding have a norm of each name.
    for ours in list(file_names):
        match = re.fullmatch(r"layers\.([1-9]\d{0,3})\.hidden_norm\.weight", ours)
        renamed = f"layers.{match[1]}.input_layernorm.weight" if match else ours
        if renamed not in file_names:
            file_names[renamed] = file_names.pop(ours)
    return file_names, unread


def _empty_head(layout: Layout, fields: Fields, shapes: Shapes) -> Any:
    """Create a head according to the config and the shapes of the tensors by our names."""
    config_class = layout.head_class.config_class
    if layout.settings_of is None:
        config = config_class.from_dict(fields)
    else:
        for path, wanted in layout.expected.items():
            found = lookup(fields, path, wanted)
            if found != wanted:
                raise CheckpointFormatError(f"`{path}` is {shortened(found)}; only {wanted!r} is supported.")
        given = {ours: lookup(fields, path) for ours, path in layout.fields.items()}
        known = {**layout.fixed, **{name: value for name, value in given.items() if value is not None}}
        settings = layout.settings_of(layout, fields, known, shapes)
        rules = getattr(config_class, "rules", None)  # a target's layer (`LayerMtpConfig`) is checked by its row
        config = config_class(**(settings if rules is None else checked(settings, rules)))
    counted = [getattr(config, name, 1) for name in ("medusa_num_heads", "medusa_num_layers", "num_hidden_layers")]
    if max(*counted, len(getattr(config, "eagle_aux_hidden_state_layer_ids", None) or ())) > len(shapes):
        raise CheckpointFormatError("its config has more layers or heads than there are tensors.")
    return layout.head_class(config)


# ----------------------------------------------------------------------------------------------- tensors


def _check_shapes(state: Tensors, shapes: Shapes, file_names: Mapping[str, str], where: str) -> None:
    """Check that the tensors of the files, by our names, are exactly those of a head."""
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    problems = {
        "missing tensors": sorted(name.removeprefix("module.") for name in wanted.keys() - shapes.keys()),
        "unknown tensors": sorted(file_names.get(name, name) for name in shapes.keys() - wanted.keys()),
        "wrong shapes": [
            f"{file_names.get(name, name)} {shapes[name]} instead of {wanted[name]}"
            for name in sorted(wanted.keys() & shapes.keys())
            if shapes[name] != wanted[name]
        ],
    }
    text = "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names)
    if text:
        raise HeadTensorsError(f"{where}: the tensors do not match the config. {text}.")


def _copy(ours: str, name: str, tensor: Tensor, where: str) -> Tensor:
    """Return `copy_checked` of a tensor of a head, an int64 copy of one that defines a draft vocabulary."""
    if ours not in VOCABULARIES:
        return copy_checked(name, tensor, where)
    if tensor.dtype not in INTEGERS:
        raise CheckpointFormatError(
            f"{where}: {name} is {tensor.dtype}, expected one of {', '.join(map(str, INTEGERS))}."
        )
    return tensor.to(torch.long)


def copy_checked(name: str, tensor: Tensor, where: str) -> Tensor:
    """Return a copy of a weight; refuse unsupported dtypes, and values not finite or too large for float16."""
    if tensor.dtype not in FLOATS:
        raise CheckpointFormatError(
            f"{where}: {name} is {tensor.dtype}, expected one of {', '.join(map(str, FLOATS))}.",
            "Quantised heads are not supported, use the original weights.",
        )
    largest = tensor.abs().max() if tensor.numel() else tensor.new_zeros(())
    if not bool(largest <= LARGEST_WEIGHT):  # false for NaN as well
        raise CheckpointFormatError(
            f"{where}: {name} has values that are not finite, or larger than {LARGEST_WEIGHT:g} (maximum of float16)."
        )
    return tensor.clone()


def _in_vocabulary_order(tensors: Tensors, mask: Tensor | None, vocab_size: int | None, where: str) -> Tensors:
    """Sort the draft vocabulary by token id, and the rows of every lm_head with it.

    ModelOpt and NeMo sort it by frequency. A `d2t` of 0, 1, 2, ... holds ids instead of offsets if it covers the whole
    vocabulary, or if `t2d`, the mask of the target's tokens in the draft vocabulary, selects exactly the first tokens
    (verl-SpeCo).
    """
    offsets = tensors["d2t"]
    numbers = torch.arange(len(offsets), device=offsets.device)
    if mask is not None:
        if mask.dtype not in (torch.bool, *INTEGERS):
            raise CheckpointFormatError(f"{where}: t2d is {mask.dtype}, expected torch.bool.")
        mask = mask.flatten().bool()
    size = vocab_size or MAX_VOCABULARY
    first = None if mask is None else torch.arange(len(mask), device=offsets.device) < len(offsets)
    are_ids = len(offsets) == vocab_size or (mask is not None and first is not None and torch.equal(mask, first))
    ids = numbers if are_ids and torch.equal(offsets, numbers) else offsets + numbers
    ids, order = ids.sort()
    if bool((ids[1:] == ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise CheckpointFormatError(f"{where}: d2t must yield distinct target ids from 0 to {size - 1}.")
    # buffers that were never set are ignored: t2d is all ones in SpecForge, zeros in AngelSlim, and d2t zeros
    is_unset = mask is not None and bool(mask.all() or not mask.any()) and not bool(offsets.any())
    is_whole = vocab_size is None or mask is None or len(mask) == vocab_size
    if mask is not None and not is_unset and not (is_whole and torch.equal(mask.nonzero().flatten(), ids)):
        raise CheckpointFormatError(f"{where}: t2d and d2t select different tokens.")
    sorted_rows = {
        name: tensor[order]
        for name, tensor in tensors.items()
        if name in ("lm_head.weight", "markov_head.markov_w2.weight") or re.fullmatch(r"heads\.\d+\.\d+\.weight", name)
    }
    return {**tensors, **sorted_rows, "d2t": ids - numbers}
