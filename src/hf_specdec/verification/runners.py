"""How a verify forward is run: by the model itself, or as a program of inductor's; `graphs.py` records either.

A program is recorded once: the forward's operations, without its Python, for trees of any number of nodes and batches
of any size. Its weights are packed for the processor (a copy of them, which costs their memory once more). Attention
stays one operation that the program knows only by name: it appends to the cache and attends to exactly the committed
tokens, so that no length is ever compiled or padded. Outputs that hooks would have kept leave as further outputs.
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
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hf_specdec.verification.attention import AttentionContext, attending, implementation
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.features import FeatureTap
from hf_specdec.verification.graph_backends import UNCAPTURED
from hf_specdec.verification.masks import MaskLayout, Masks, TreeInputs, tree_masks
from hf_specdec.verification.memory import CacheLayout, persistent_tensors
from hf_specdec.verification.model import cache_argument, execution_device, text_config

CPU_OPTIONS: dict[str, Any] = {
    "freezing": True,  # weights become constants that are packed for the kernels; the model keeps its own
    "cpp.enable_concat_linear": True,  # layers that read the same input are multiplied at once
}
"""Inductor's options on a CPU. Elsewhere weights stay where they are: a packed copy takes as much memory again."""
EXAMPLE_SHAPE = (2, 12)
"""Rows and nodes of the forward that is recorded: sizes that no other size of a model has a reason to equal."""


ExecutionMode = Literal["compile", "cuda_graph"]
"""What a forward can be besides the module's own: a program, or graphs; on a device with graphs a program is both."""


class Runner(ABC):
    """A verify forward, in the model's own form or another.

    Attributes:
        layers: Whose hidden states it gives, see `Features`.
    """

    layers: frozenset[int]

    @abstractmethod
    def __call__(
        self, tokens: Tensor, positions: Tensor, forward: AttentionContext, cache: Cache
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits `[B, N, V]` and hidden states `[B, N, D]` by layer; appends to the cache.

        Args:
            tokens: `[B, N]`.
            positions: `[B, N]`.
            forward: What its attention layers have in common.
            cache: This generation's.
        """

    def verify(self, inputs: TreeInputs, cache: Cache) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the forward over a tree; see `__call__` for what it returns."""
        tree = inputs.tree
        ancestors = tree.ancestor_mask()
        masks = tree_masks(inputs.layout, ancestors, inputs.lengths, inputs.start, inputs.padding, inputs.dtype)
        positions = inputs.positions.of_nodes(ancestors.sum(-1) - 1, inputs.lengths)
        return self(tree.tokens, positions.expand(tree.tokens.shape), attention_of(masks, inputs), cache)

    def new_cache(self, layout: CacheLayout, capacity: int, reserve: int | None) -> TreeCache:
        """A cache that it can append to, see `TreeCache`."""
        return TreeCache(layout, capacity, reserve)

    def takes(self, num_nodes: int, cache: Cache) -> bool:
        """Whether it can append so many nodes to this cache."""
        return True

    def release(self, cache: Cache) -> None:  # noqa: B027  (most keep nothing)
        """The call that a cache was made for has ended."""


def attention_of(masks: Masks, inputs: TreeInputs) -> AttentionContext:
    """What the attention layers of a forward over a tree have in common."""
    layers = inputs.layout.layers
    return AttentionContext(
        {layers[0][0]: masks} if isinstance(masks, Tensor) else masks,
        frozenset(name for name, kind, _ in layers if inputs.all_seen and kind == "full"),
    )


class ModelForward(Runner):
    """The model's own forward, attending without copies.

    Args:
        model: The target, which it does not keep alive.
        layers: Whose hidden states are wanted.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._model, self._order, self.layers = weakref.ref(model), tuple(layers), frozenset(layers)
        self._cache_argument = cache_argument(model)

    def __call__(
        self, tokens: Tensor, positions: Tensor, forward: AttentionContext, cache: Cache
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Runner`."""
        model, masks = self._model(), forward.masks
        assert model is not None
        with attending(text_config(model), forward), FeatureTap(model, self._order) as tap:
            outputs = model(
                input_ids=tokens,
                attention_mask=dict(masks) if len(masks) > 1 else next(iter(masks.values())),
                position_ids=positions,
                use_cache=True,
                return_dict=True,
                **{self._cache_argument: cache},
            )
            return outputs.logits, dict(tap.take().states)


class CaptureError(Exception):
    """A forward that is more than its operations; the message tells why."""


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """Which numbers a program was made of: equal as long as no weight was moved, replaced or written to."""

    places: tuple[tuple[int, int], ...]  # address and number of writes of every parameter and buffer

    @classmethod
    def of(cls, *modules: nn.Module) -> WeightsVersion:
        """Read no number of them; see docs/compile.md for what it takes."""
        found: list[tuple[Tensor, bool]] = [(tensor, True) for module in modules for tensor in module.parameters()]
        for part in (part for module in modules for part in module.modules()):
            for name, buffer in part._buffers.items():
                if buffer is not None:  # what is no weight may be written to by the forward itself (longrope's table)
                    found.append((buffer, name not in part._non_persistent_buffers_set))
        return cls(tuple((_address(t), t._version if counts and not t.is_inference() else 0) for t, counts in found))


def _address(tensor: Tensor) -> int:
    """Where its numbers lie; of one that is made of others (quantised, sharded) the object itself."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) else id(tensor)


def compile_operations(step: Callable[..., list[Tensor]], *inputs: Tensor) -> Callable[..., Sequence[Tensor]]:
    """Record what a function does and compile it, for inputs of these sizes or any other.

    Args:
        step: What is recorded: it is called once.
        *inputs: Of distinct sizes wherever sizes may differ, none of them 1.

    Raises:
        CaptureError: It reads numbers on the host, or fails.
    """
    try:
        with persistent_tensors():
            graph = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
            sizes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
            options = CPU_OPTIONS if inputs[0].device.type == "cpu" else UNCAPTURED
            program: Callable[..., Sequence[Tensor]] = torch._inductor.compile(graph, sizes, options=options)
    except CaptureError:
        raise
    except Exception as error:  # of any kind: it comes out of a model's own code, or a compiler's
        raise CaptureError(f"it cannot be recorded ({type(error).__name__}: {error})") from error
    return program


class CompiledForward(Runner):
    """A verify forward as inductor compiled it, for any number of rows and nodes.

    Args:
        run: Tokens, positions and the number of tokens before them to logits and hidden states.
        layers: Whose hidden states, in their order.
    """

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]], layers: Sequence[int]) -> None:
        self._run, self._order, self.layers = run, tuple(layers), frozenset(layers)

    @classmethod
    def of(cls, model: PreTrainedModel, layers: Sequence[int]) -> CompiledForward:
        """Record and compile: most of a minute for a small model, in every process.

        Args:
            model: The target; it is left as it is.
            layers: Whose hidden states are wanted.

        Raises:
            CaptureError: The forward reads numbers on the host, attends in a way of its own, or fails.
        """
        layers = sorted(set(layers))
        tokens = torch.zeros(EXAMPLE_SHAPE, dtype=torch.long, device=execution_device(model))
        start = torch.zeros((), dtype=torch.long, device=tokens.device)
        run = compile_operations(_verify_step(model, layers), tokens, tokens.clone(), start)
        return cls(run, layers)

    def __call__(
        self, tokens: Tensor, positions: Tensor, forward: AttentionContext, cache: Cache
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Runner`."""
        token, start = _RUNNING.set((forward, cache)), cache.get_seq_length()
        try:
            start = start if isinstance(start, Tensor) else torch.tensor(start, dtype=torch.long, device=tokens.device)
            logits, *states = self._run(tokens.contiguous(), positions.contiguous(), start)
        finally:
            _RUNNING.reset(token)
        return logits, dict(zip(self._order, states, strict=True))


_RUNNING: ContextVar[tuple[AttentionContext, Cache] | None] = ContextVar("running", default=None)


def _append_and_attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, kind: str, scaling: float | None
) -> Tensor:
    """The one operation of a program that knows of this generation."""
    running = _RUNNING.get()
    assert running is not None
    forward, cache = running
    keys, values = cache.update(key, value, layer)
    return forward.attend(kind, query, keys, values, scaling)


def _shape_of_attention(
    query: Tensor, _key: Tensor, value: Tensor, _layer: int, _kind: str, _scaling: float | None
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@functools.cache
def _define_operation() -> torch.library.Library:
    """Once in a process; the operation exists as long as this object, which the cache of this function keeps."""
    library = torch.library.Library("hf_specdec", "DEF")
    library.define(
        "tree_attention(Tensor query, Tensor key, Tensor value, int layer, str kind, float? scale) -> Tensor"
    )
    library.impl("tree_attention", _append_and_attend, "CompositeExplicitAutograd")
    library.impl("tree_attention", _shape_of_attention, "Meta")
    return library


class _RecordedLayer(CacheLayerMixin):
    """A layer's cache in a forward that is recorded: what is appended comes back alone, and is known again."""

    is_sliding = False
    is_initialized = True
    keys: Tensor | None = None
    start: Any = 0  # tokens before those that are given, where it is known

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """What was given."""
        self.keys = key_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Never used: masks are given."""
        return query_length, 0

    def get_seq_length(self) -> Any:
        """The number of committed tokens, which is an input of the program."""
        return self.start

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The name transformers 5.17 has for `get_max_length`."""
        return -1


def _verify_step(model: PreTrainedModel, layers: Sequence[int]) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    """What is recorded: tokens and positions `[B, N]`, and the tokens before them, to logits and hidden states.

    Raises:
        CaptureError: See `CompiledForward.of`.
    """
    config, device = text_config(model), execution_device(model)
    if implementation(config) != "sdpa":
        raise CaptureError(f"its attention is {implementation(config)!r}, not 'sdpa'")
    _define_operation()
    operation = torch.ops.hf_specdec.tree_attention.default
    recorded = [_RecordedLayer() for _ in range(config.num_hidden_layers)]
    attended: set[int] = set()

    def attend(kind: str, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        layer = next((index for index, layer in enumerate(recorded) if layer.keys is key), None)
        if layer is None:
            raise CaptureError("a layer attends to keys that it has not appended to the cache")
        attended.add(layer)
        output: Tensor = operation(query, key, value, layer, kind, scaling)
        return output

    masks = {
        name: torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) for name, *_ in MaskLayout.of(config).layers
    }
    forward, run = AttentionContext(masks, attend=attend), ModelForward(model, layers)

    def step(tokens: Tensor, positions: Tensor, start: Tensor) -> list[Tensor]:
        for layer in recorded:
            layer.start = start
        logits, states = run(tokens, positions, forward, Cache(layers=recorded))
        if attended != set(range(len(recorded))):
            raise CaptureError("its layers attend in a way of their own")
        return [logits, *(states[layer] for layer in layers)]

    return step
