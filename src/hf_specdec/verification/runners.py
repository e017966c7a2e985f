"""Runners of the verify forward: the model itself, or a compiled forward; `captured.py` captures either.

A compiled forward is traced once, for any batch size and number of nodes, see `programs.py`. Attention remains one
custom operation that appends to the cache and attends to exactly the slots written so far, so lengths are neither
compiled nor padded. Hidden states, which hooks would otherwise collect, are additional outputs.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hf_specdec.config import ExecutionMode
from hf_specdec.cpu import operations
from hf_specdec.cpu.library import is_loaded
from hf_specdec.transformers_private import attention_name, experts_name, supports_logits_to_keep
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.cache import FixedLayer, TreeCache
from hf_specdec.verification.features import FeatureTap, PromptPadding
from hf_specdec.verification.masks import MaskLayout, Masks, TreeInputs, chain_masks
from hf_specdec.verification.memory import CacheLayout
from hf_specdec.verification.model import cache_argument, execution_device, takes_positions, text_config
from hf_specdec.verification.programs import AttentionForms, CaptureError, Program, make_program
from hf_specdec.verification.recurrence import Branches, Inputs
from hf_specdec.verification.recurrent_layer import (
    NONE_RECURRENT,
    BranchingLayer,
    RecurrentLayout,
    attends,
    branching,
    recurrent_layers,
    recurring,
)
from hf_specdec.verification.target import expert_products
from hf_specdec.verification.tree_attention import AttentionContext, append_and_attend, attending, kernel_can_use

TARGET_EXAMPLE_SHAPE, EXAMPLE_KEPT = (2, 12), 5
"""Rows and nodes of the traced forward, and nodes with logits: sizes unlikely to equal others of a model."""
READ_AT_ONCE = 512
"""Tokens of a prompt that a program reads at once, of each row: bounds the memory of its intermediate results."""


class Runner(ABC):
    """Base class of the ways to run a verify forward.

    Attributes:
        reads_prompts: Whether it can `read`; "slowly" if the model's own forward is faster.
        layers: Layers whose hidden states it returns, see `Features`.
        copies_weights: Whether it computes with copies of the weights, which do not change with the model's.
        grows: Whether it can run the new nodes of a growing tree alone.
        widths: Numbers of nodes that a tree is padded to, ascending; empty if trees are not padded.
        inexact: Why a node's result may depend on the other nodes and rows of a forward, as a clause; empty if it
            does not (with graphs: in forwards of one width). Known once a forward has run.
    """

    layers: frozenset[int]
    copies_weights = False
    grows = True
    reads_prompts: Literal[True, False, "slowly"] = False
    widths: tuple[int, ...] = ()
    inexact: str = ""

    @abstractmethod
    def __call__(
        self, tokens: Tensor, positions: Tensor, forward: AttentionContext, cache: Cache
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return logits `[B, N, V]` and hidden states `[B, N, D]` by layer, given `[B, N]`; append to the cache."""

    def verify(self, inputs: TreeInputs, cache: Cache, known: int = 0) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the forward over all nodes of a tree but the first `known`, and return the same as `__call__`."""
        masks, positions = inputs.masks_and_positions(known)
        tokens = inputs.tree.tokens[:, known:]
        context = attention_of(masks, inputs, inputs.order() if tokens.is_cpu and not known else None, known)
        return self(tokens, positions.expand(tokens.shape), context, cache)

    def read(
        self, tokens: Tensor, positions: Tensor, cache: TreeCache, padding: PromptPadding | None, layout: MaskLayout,
        *, all_logits: bool,
    ) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
        """Append tokens `[B, P]` of a prompt, and return logits `[B, 1, V]`, or all `[B, P, V]`, and hidden states."""
        raise NotImplementedError

    def new_cache(
        self, layout: CacheLayout, capacity: int, reserve: int | None, recurrent: RecurrentLayout = NONE_RECURRENT
    ) -> TreeCache:
        """Return a cache for this runner; see `TreeCache` for the arguments."""
        return TreeCache(layout, capacity, reserve, recurrent=recurrent)

    def can_run(self, num_nodes: int, cache: Cache) -> bool:
        """Whether this runner can append a tree of `num_nodes` to this cache."""
        return True

    def num_rows(self, active: int) -> int:
        """Return how many rows forwards should have if `active` rows of a batch have not ended."""
        return active

    def release(self, cache: Cache) -> None:  # noqa: B027  (optional)
        """Release the memory of a cache whose call has ended; by default there is none to release."""


def attention_of(masks: Masks, inputs: TreeInputs, order: Tensor | None = None, known: int = 0) -> AttentionContext:
    """Return the context shared by the layers of a forward over a tree, of which the first nodes are known."""
    layers = inputs.layout.layers
    return AttentionContext(
        {layers[0][0]: masks} if isinstance(masks, Tensor) else masks,
        frozenset(name for name, kind, _ in layers if inputs.all_seen and kind == "full"),
        order=order,
        branches=inputs.branches(known),
    )


class ModelForward(Runner):
    """The model's own forward, with attention that does not copy keys and values.

    Args:
        model: The target; only a weak reference is kept.
        layers: Layers whose hidden states are returned.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._model, self._order, self.layers = weakref.ref(model), tuple(layers), frozenset(layers)
        self._cache_argument, self._takes_positions = cache_argument(model), takes_positions(model)

    def __call__(
        self, tokens: Tensor, positions: Tensor, forward: AttentionContext, cache: Cache, *, kept: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Runner`; with `kept` `[K]`, return the logits of these nodes only."""
        model = self._model()
        assert model is not None
        where = {"position_ids": positions} if self._takes_positions else {}
        with attending(forward), recurring(model, cache, forward.branches), FeatureTap(model, self._order) as tap:
            outputs = model(
                input_ids=tokens,
                attention_mask=forward.argument(),
                **where,
                use_cache=True,
                return_dict=True,
                **{self._cache_argument: cache},
                **({} if kept is None else {"logits_to_keep": kept}),
            )
            return outputs.logits, dict(tap.take().states)


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """Identity of the weights that a runner was built from; differs if any was moved, replaced or written to.

    Writes to inference tensors, and to buffers that are not saved, are not detected.
    """

    tensors: tuple[tuple[int, int], ...]  # address and counted writes of every parameter and buffer

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of all parameters and buffers."""
        return tuple(address for address, _ in self.tensors)

    @classmethod
    def of(cls, *modules: nn.Module) -> WeightsVersion:
        """Describe the current weights without reading their values; cost: see docs/compile.md."""
        tensors: list[tuple[Tensor, bool]] = [(tensor, True) for module in modules for tensor in module.parameters()]
        for part in (part for module in modules for part in module.modules()):
            for name, buffer in part._buffers.items():
                if buffer is not None:  # forwards may write to buffers that are not saved (longrope's table)
                    tensors.append((buffer, name not in part._non_persistent_buffers_set))
        return cls(tuple((_address(t), t._version if counts and not t.is_inference() else 0) for t, counts in tensors))


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's data, or its id if it wraps other tensors (quantized, sharded)."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) else id(tensor)


class CompiledForward(Runner):
    """A verify forward as a program (see `make_program`), traced here, for any batch size and number of nodes.

    Args:
        model: The target; it is not modified.
        layers: Layers whose hidden states are returned.
        mode: See `make_program`.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], mode: ExecutionMode) -> None:
        self._order, self.layers = sorted(set(layers)), frozenset(layers)
        tokens = torch.zeros(TARGET_EXAMPLE_SHAPE, dtype=torch.long, device=execution_device(model))
        start = torch.zeros((), dtype=torch.long, device=tokens.device)
        self._keeps = mode == "kernels" and supports_logits_to_keep(model)
        example = [tokens, tokens.clone(), start]
        if self._keeps:
            example.append(torch.arange(EXAMPLE_KEPT, device=tokens.device))
        step = _verify_step(model, self._order)
        kinds = (f"{name}_attention" for name in ("tree", "joined", "rotated"))
        attention = AttentionForms(*(getattr(torch.ops.hf_specdec, kind).default for kind in kinds))
        self._config = text_config(model)
        self._programs: dict[str | None, Program] = {}  # by the implementation of the experts' products, if any
        for num_tokens in (tokens.numel(), 1):
            with expert_products(model, num_tokens):
                name = experts_name(self._config)
                if name not in self._programs:
                    self._programs[name] = make_program(step, *example, mode=mode, attention=attention)
        if mode == "cuda_graph" and not self._programs[name].num_fused:
            raise CaptureError("none of its small operations can be fused")
        self.copies_weights = self._programs[name].copies_weights
        self._dtype, self._attends_by_torch = model.dtype if mode == "kernels" else None, False
        self.inexact = next((program.inexact for program in self._programs.values() if program.inexact), "")
        self._is_recurrent = bool(recurrent_layers(self._config))
        if self._is_recurrent:
            self.inexact = self.inexact or "its recurrent layers read prompts in chunks"

    @property
    def reads_prompts(self) -> Literal[True, False, "slowly"]:  # type: ignore[override]
        """See `Runner`."""
        if self._dtype is None or self._attends_by_torch or self._is_recurrent or not is_loaded():
            return False
        return "slowly" if operations.multiplies_slowly(self._dtype) else True

    def __call__(
        self, tokens: Tensor, positions: Tensor, forward: AttentionContext, cache: Cache, *, kept: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Runner`; with `kept` `[K]`, return the logits of these nodes only."""
        has_slots = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
        token, start = _RUNNING.set((forward, cache)), cache.get_seq_length() if has_slots else 0
        try:
            start = start if isinstance(start, Tensor) else torch.tensor(start, dtype=torch.long, device=tokens.device)
            given = [tokens, positions, start]
            if self._keeps:
                given.append(torch.arange(tokens.shape[1], device=tokens.device) if kept is None else kept)
            with branching(cache, forward.branches):
                logits, *states = self._programs[experts_name(self._config)](*given)
        finally:
            _RUNNING.reset(token)
        if forward.has_attended:
            self._attends_by_torch, self.inexact = True, self.inexact or "torch computes its attention"
        if kept is not None and not self._keeps:
            logits = logits[:, kept]
        return logits, dict(zip(self._order, states, strict=True))

    def read(
        self, tokens: Tensor, positions: Tensor, cache: TreeCache, padding: PromptPadding | None, layout: MaskLayout,
        *, all_logits: bool,
    ) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
        """See `Runner`; attention is that of a chain, which needs no mask of the whole text."""
        names, parts = {name for name, *_ in layout.layers}, []
        for begin in range(0, tokens.shape[1], READ_AT_ONCE):
            some, start = tokens[:, begin : begin + READ_AT_ONCE], int(cache.get_seq_length())
            count = some.shape[1]
            masks = chain_masks(layout, start, count, padding)
            first = tokens.new_zeros(len(tokens)) if padding is None else padding.left
            context = AttentionContext(masks, frozenset(names - set(masks)), order=first[:, None])
            kept = None if all_logits else torch.tensor([count - 1], dtype=torch.long, device=tokens.device)
            where = positions[:, begin : begin + READ_AT_ONCE].expand(some.shape)
            parts.append(self(some, where, context, cache, kept=kept))
        logits = torch.cat([logits for logits, _ in parts], dim=1) if all_logits else parts[-1][0]
        return logits, {layer: torch.cat([states[layer] for _, states in parts], dim=1) for layer in self._order}


_RUNNING: ContextVar[tuple[AttentionContext, Cache] | None] = ContextVar("running", default=None)
"""Masks and cache of the compiled forward that runs in this thread."""


def _convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, layer: int, index: int
) -> Tensor:
    """Convolve new nodes `[B, C, N]` in a recurrent layer of the running forward's cache; returns rows of channels."""
    output = _running()[1].layers[layer].convolve(index, inputs, weight, bias, activation)
    return output.transpose(1, 2).contiguous().transpose(1, 2)


def _recur(inputs: Sequence[Tensor | None], kind: str, flag: bool, layer: int, call: int) -> Tensor:
    """Continue the states of a recurrent layer of the running forward's cache, see `recurrence.FORMS`."""
    return _running()[1].layers[layer].recur(call, kind, inputs, flag)


def _running() -> tuple[AttentionContext, Cache]:
    running = _RUNNING.get()
    assert running is not None
    return running


def _append_and_attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, kind: str, scaling: float | None
) -> Tensor:
    """Append `[B, Hkv, N, *]` to a layer of the running forward's cache and attend `[B, H, N, D]`: `[B, N, H, Dv]`."""
    forward, cache = _running()
    output = append_and_attend(cache, layer, query, key, value, forward.mask(kind), scaling, forward.order)
    if output is not None:
        return output
    keys, values = cache.update(key, value, layer)
    return forward.attend(kind, query, keys, values, scaling)


def _append_and_attend_joined(
    joined: Tensor, cos: Tensor, sin: Tensor, shared: int, size: int, layer: int, kind: str, scaling: float | None
) -> Tensor:
    """Like `_append_and_attend`, for the queries, keys and values of `operations.attend_joined`; heads have `size`."""
    forward, cache = _running()
    if isinstance(cache, TreeCache) and operations.can_attend(joined, cos, sin):
        entry = cache.layers[layer]
        if entry.is_initialized and kernel_can_use(entry, joined.dtype):
            keys, values, begin = entry.reserve_slots(joined.shape[1])
            mask = forward.mask(kind)
            return operations.attend_joined(
                joined, cos, sin, shared, keys, values, begin, mask, scaling, forward.order
            )
    heads = joined.unflatten(-1, (-1, size)).transpose(1, 2)
    query, key, value = heads.split([heads.shape[1] - 2 * shared, shared, shared], dim=1)
    query, key = operations.rotary(query, cos, sin), operations.rotary(key, cos, sin)
    return _append_and_attend(query, key, value, layer, kind, scaling)


def _rotate_append_and_attend(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, layer: int, kind: str, scaling: float | None
) -> Tensor:
    """Like `_append_and_attend`, for queries and keys before rotary embedding."""
    forward, cache = _running()
    if isinstance(cache, TreeCache):
        query, key = (torch.ops.hf_specdec_fused.rotary(part, cos, sin) for part in (query, key))
        return _append_and_attend(query, key, value, layer, kind, scaling)
    entry: Any = cache.layers[layer]
    query, keys, values = entry.rotate_and_update(query, key, value, cos, sin)
    return forward.attend(kind, query, keys, values, scaling)


@functools.cache
def _define_target_attention() -> torch.library.Library:
    """Define the custom operations, once per process; they exist as long as the returned library, which is cached."""
    library = torch.library.Library("hf_specdec", "DEF")
    where = "int layer, str kind, float? scale) -> Tensor"
    library.define(f"tree_attention(Tensor query, Tensor key, Tensor value, {where}")
    library.define(f"joined_attention(Tensor joined, Tensor cos, Tensor sin, int shared, int size, {where}")
    library.define(f"rotated_attention(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, {where}")

    def shape(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    def joined_shape(joined: Tensor, _cos: Tensor, _sin: Tensor, shared: int, size: int, *_: object) -> Tensor:
        return joined.new_empty(*joined.shape[:2], joined.shape[2] // size - 2 * shared, size)

    def convolved(inputs: Tensor, *_: object) -> Tensor:
        rows, channels, nodes = inputs.shape
        return inputs.new_empty(rows, nodes, channels).transpose(1, 2)

    def recurred(inputs: Sequence[Tensor], kind: str, *_: object) -> Tensor:
        values = inputs[2] if kind == "delta_rule" else inputs[0]
        return values.new_empty(values.shape)

    library.define(
        "tree_convolution(Tensor x, Tensor weight, Tensor? bias, str? activation, int layer, int index) -> Tensor"
    )
    library.define("tree_recurrence(Tensor?[] inputs, str kind, bool flag, int layer, int call) -> Tensor")
    functions: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "tree_convolution": (_convolve, convolved),
        "tree_recurrence": (_recur, recurred),
        "tree_attention": (_append_and_attend, shape),
        "joined_attention": (_append_and_attend_joined, joined_shape),
        "rotated_attention": (_rotate_append_and_attend, shape),
    }
    for name, (run, shape_of) in functions.items():
        library.impl(name, run, "CompositeExplicitAutograd")
        library.impl(name, shape_of, "Meta")
    return library


class _TracedLayer(FixedLayer):
    """Cache layer used while tracing: returns exactly the appended tensors, which identify the layer."""

    keys: Tensor | None = None
    start: Any = 0  # number of slots before the new nodes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the given keys and values."""
        self.keys = key_states
        return key_states, value_states

    def get_seq_length(self) -> Any:
        """Return the number of slots before the new nodes, an input of the compiled forward."""
        return self.start


class _TracedStates(BranchingLayer):
    """Recurrent layer used while tracing: its functions become operations."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._layer = layer

    def convolve(
        self, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """See `RecurrentState.convolve`."""
        operation = torch.ops.hf_specdec.tree_convolution
        return operation(inputs, weight, bias, activation, self._layer, index)

    def recur(self, call: int, kind: str, inputs: Inputs, flag: bool) -> Tensor:
        """See `RecurrentState.recur`."""
        return torch.ops.hf_specdec.tree_recurrence(list(inputs), kind, flag, self._layer, call)


class _TracedHybrid(_TracedStates, _TracedLayer):
    """Layer used while tracing that holds keys and values as well."""


def _traced_layers(config: Any) -> list[Any]:
    recurrent, layers = recurrent_layers(config), list[Any]()
    for index in range(config.num_hidden_layers):
        if index not in recurrent:
            layers.append(_TracedLayer())
        else:
            layers.append((_TracedHybrid if recurrent[index][1] else _TracedStates)(index))
    return layers


def _verify_step(model: PreTrainedModel, layers: Sequence[int]) -> Callable[..., list[Tensor]]:
    """Return the function to trace, see `CompiledForward`."""
    config, device = text_config(model), execution_device(model)
    if attends(config) and attention_name(config) != "sdpa":
        raise CaptureError(f"its attention is {attention_name(config)!r}, not 'sdpa'")
    _define_target_attention()
    operation = torch.ops.hf_specdec.tree_attention.default
    cache_layers = _traced_layers(config)
    dummies = [type(layer).__name__ == "DummyLayer" for layer in DynamicCache(config=config).layers]
    attending_layers = {  # in transformers 5.17, the cache ends before the layers that share keys
        index
        for index, (layer, is_dummy) in enumerate(zip(cache_layers, dummies, strict=False))
        if isinstance(layer, _TracedLayer) and not is_dummy
    }
    attended: set[int] = set()

    def attend(kind: str, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        keys = [getattr(layer, "keys", None) for layer in cache_layers]
        layer = next((index for index, appended in enumerate(keys) if appended is key), None)
        if layer is None or layer in attended:
            raise CaptureError("a layer attends to keys that it has not appended to the cache")
        attended.add(layer)
        return operation(query, key, value, layer, kind, scaling)

    masks = {
        name: torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) for name, *_ in MaskLayout.of(config).layers
    }
    root = torch.full((1, 1), ROOT_PARENT, dtype=torch.long, device=device)
    forward = AttentionContext(masks, attend=attend, branches=Branches.of(TokenTree(root, root)))
    run = ModelForward(model, layers)

    def step(tokens: Tensor, positions: Tensor, start: Tensor, *kept: Tensor) -> list[Tensor]:
        attended.clear()
        for layer in cache_layers:
            layer.start = start
        logits, states = run(tokens, positions, forward, Cache(layers=cache_layers), kept=kept[0] if kept else None)
        if attended != attending_layers:
            raise CaptureError("some of its layers do not call transformers' attention function")
        if not all(layer.has_run for layer in cache_layers if isinstance(layer, BranchingLayer)):
            raise CaptureError("some of its recurrent layers do not pass their states to the cache")
        return [logits, *(states[layer] for layer in layers)]

    return step
