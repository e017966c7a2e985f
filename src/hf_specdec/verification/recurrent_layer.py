"""Recurrent states in the cache of a target, and the functions of transformers that trees replace.

Every recurrent mixer of transformers (Gated DeltaNet, KDA, Mamba, short convolutions) is written alike: it asks the
cache for its states, hands the inputs of its convolution to `cache.update_conv_state`, and calls a convolution and a
recurrence by their names in its own module. While a tree is verified, its cache layer claims to have no state, so that
the mixer takes its form for many tokens, and `recurring` replaces those names by functions that let every node
continue the state of its parent (`recurrence.py`). No architecture is named. A mixer that computes something else with
its states does not call these functions, which is noticed.

A commit does not touch the states: it notes the accepted path, which the next forward enters into each state when it
reads it. So a state is read and written once per step in every form of execution, and running a forward again with the
same inputs, as a capture does, changes nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from hf_specdec.cpu import operations
from hf_specdec.errors import UnsupportedModelError, listed
from hf_specdec.verification import recurrence
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.recurrence import FORMS, Branches, Inputs, Updates

RECURRENT_LAYERS: Mapping[str, bool] = {
    "LinearAttentionLayer": False,
    "LinearAttentionAndFullAttentionLayer": True,
    "LinearAttentionAndSlidingWindowAttentionLayer": True,
}
"""transformers' cache layers with recurrent states, and whether they hold keys and values as well."""
KEPT_NODES = 64
"""Nodes per row for whose updates memory is kept between calls; wider trees make it grow."""


RecurrentLayout = Mapping[int, tuple[int, bool]]
"""Layers with recurrent states, by index: the number of states, and whether there are keys and values as well."""
NONE_RECURRENT: RecurrentLayout = MappingProxyType({})


def recurrent_layers(config: Any) -> RecurrentLayout:
    """Return the layers with recurrent states of a text configuration."""
    found = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if (kind := type(layer).__name__) in RECURRENT_LAYERS:
            found[index] = int(layer.number_of_states), RECURRENT_LAYERS[kind]
    return found


def state_shapes(cache: Cache) -> dict[int, list[list[int]]]:
    """Return the shapes of the windows and states of each recurrent layer, without the rows, by index of the layer."""
    found = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            parts = [*layer.conv_states.values(), *layer.recurrent_states.values()]
            found[index] = [list(part.shape[1:]) for part in parts if part is not None]
    return found


def attends(config: Any) -> bool:
    """Whether any layer of a text configuration holds keys and values."""
    recurrent = recurrent_layers(config)
    return len(recurrent) < config.num_hidden_layers or any(has_keys for _, has_keys in recurrent.values())


class RecurrentState:
    """States of one layer after the committed tokens, except those of an accepted path that is still to be entered.

    Args:
        number: Number of states.
        rows_for: Rows to allocate for a number of rows if memory is kept between calls; None: memory of one call.

    Attributes:
        windows, states: Inputs of convolutions `[B, C, K]` and states, e.g. `[B, H, Dk, Dv]`, by index; None before
            the first tokens.
        has_previous: Whether there have been tokens, by index.
        moves: Number of times that kept memory was reallocated or freed.
    """

    def __init__(self, number: int, rows_for: Callable[[int], int] | None = None) -> None:
        self._rows_for, self.number, self.moves = rows_for, number, 0
        self.windows: dict[int, Tensor | None] = dict.fromkeys(range(number))
        self.states: dict[int, Tensor | None] = dict.fromkeys(range(number))
        self.has_previous = dict.fromkeys(range(number), False)
        self._kept: dict[Any, Tensor] = {}  # memory, with all allocated rows
        self._inputs: dict[int, Tensor] = {}  # of the last nodes, [B, C, N], by index
        self._updates: dict[int, tuple[str, Updates]] = {}  # of the last nodes, by call of a recurrence
        self._path: Tensor | None = None  # [B, P], -1 after its end

    # ------------------------------------------------------------------------------------- memory

    def place(self, name: Any, like: Tensor, *sizes: int) -> Tensor:
        """Return memory for as many rows as a tensor has, with its dtype and device; zeros unless it exists."""
        if self._rows_for is None:
            return like.new_zeros(len(like), *sizes)
        if any(len(inputs) < len(like) for inputs in self._inputs.values()):  # those of a call with fewer rows
            self._inputs, self._updates = {}, {}
        kept = self._kept.get(name)
        fits = kept is not None and kept.dtype == like.dtype and kept.shape[1:] == sizes and len(kept) >= len(like)
        if kept is None or not fits:
            self.moves += kept is not None
            with persistent_tensors():
                kept = self._kept[name] = like.new_zeros(self._rows_for(len(like)), *sizes)
        return kept[: len(like)]

    def _keep(self, name: Any, part: Tensor) -> Tensor:
        """Return `[B, *, N, ...]` of nodes where the next forward looks for it, with room for more rows and nodes."""
        if self._rows_for is None:
            return part
        nodes = -(-part.shape[2] // KEPT_NODES) * KEPT_NODES
        if name in self._kept:
            nodes = max(nodes, self._kept[name].shape[2])
        self.place(name, part, part.shape[1], nodes, *part.shape[3:])[:, :, : part.shape[2]] = part
        return self._kept[name]

    @property
    def device(self) -> torch.device:
        """Device of the windows."""
        return self._window.device

    @property
    def num_rows(self) -> int:
        """Rows of the windows."""
        return len(self._window)

    @property
    def _window(self) -> Tensor:
        return next(window for window in self.windows.values() if window is not None)

    @property
    def num_bytes(self) -> int:
        """Size of the kept memory."""
        return sum(memory.nbytes for memory in self._kept.values())

    def reopen(self) -> None:
        """Forget all tokens."""
        for name, memory in self._kept.items():
            memory.fill_(-1 if name == "path" else 0)
        for states in (self.windows, self.states):
            states.update(dict.fromkeys(states))
        self.has_previous.update(dict.fromkeys(self.has_previous, False))
        self._path = None

    def close(self) -> None:
        """Free the kept memory, also that of a call that still references it."""
        self.moves += bool(self._kept)
        self.reopen()
        self._kept, self._inputs, self._updates = {}, {}, {}

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but some: row `rows[i]`, which is i or larger, becomes row i."""
        self.flush()
        for parts in (self.windows, self.states):
            for index, part in parts.items():
                if part is not None:
                    for target, source in enumerate(rows):
                        if source != target:
                            part[target] = part[source]
                    parts[index] = part[: len(rows)]
        self._path = None

    # ------------------------------------------------------------------------------------- committed tokens

    def commit(self, path: Tensor) -> None:
        """Note the accepted path `[B, P]` of the last tree; it is entered by the next forward, or by `flush`."""
        path = path.to(self.device)
        if self._rows_for is None:
            self._path = path
            return
        kept = self.path_memory(path)
        if path.shape[1] > kept.shape[1]:
            self._enter(path)
            return
        kept.fill_(-1)
        kept[:, : path.shape[1]] = path

    def path_memory(self, like: Tensor) -> Tensor:
        """Return the memory `[B, P]` of the path."""
        is_new = "path" not in self._kept
        path = self.place("path", like, KEPT_NODES)
        if is_new:
            path.fill_(-1)
        self._path = path
        return path

    def flush(self) -> None:
        """Enter the noted path now, before something else than a forward over a tree reads the states."""
        if self._path is not None:
            self._enter(self._path)
            self.forget_path()

    def _enter(self, path: Tensor) -> None:
        for index, inputs in self._inputs.items():
            self._enter_window(index, inputs, path)
        for call, (kind, updates) in self._updates.items():
            self._enter_state(call, kind, updates, path)

    def forget_path(self) -> None:
        """Note that the path has been entered."""
        if self._rows_for is None:
            self._path = None
        elif self._path is not None:
            self._path.fill_(-1)

    def _enter_window(self, index: int, inputs: Tensor, path: Tensor) -> None:
        window = self.windows[index]
        assert window is not None
        window.copy_(recurrence.advance_window(window, inputs[: len(window)], path))

    def _enter_state(self, call: int, kind: str, updates: Updates, path: Tensor) -> None:
        state = self._state_of(call, kind)
        state.copy_(recurrence.advance(state.float(), updates.first(len(state)), path))

    def _state_of(self, call: int, kind: str) -> Tensor:
        """Return a view `[B, H, Dk, Dv]` of the state of a call; transformers keeps others for Mamba."""
        state = self.states[0]
        assert state is not None
        if kind == "mamba1":  # one call per head, if there are several (Zamba)
            return (state[:, call] if state.dim() == 4 else state)[..., None]
        return state.transpose(-1, -2) if kind == "mamba2" else state

    # ------------------------------------------------------------------------------------- nodes of a tree

    def convolve(
        self, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
        branches: Branches,
    ) -> Tensor:  # fmt: skip
        """Enter the noted path into a window, and return the convolution of new nodes, see `recurrence.convolve`."""
        window, known = self.windows[index], self._inputs.get(index)
        assert window is not None
        if self._path is None and self._rows_for is not None:
            self.path_memory(inputs[:, :0, 0].long())
        if not branches.known and operations.can_convolve(inputs, window, weight, bias, activation):
            entered = None if self._path is None or known is None else (self._path, known)
            output = operations.convolve_tree(inputs, window, weight, bias, activation, branches.parents, entered)
            self._inputs[index] = self._keep(("inputs", index), inputs)
            return output
        if branches.known:
            assert known is not None
            inputs = torch.cat([known[: len(inputs), :, : branches.known], inputs], dim=-1)
        elif self._path is not None and known is not None:
            self._enter_window(index, known, self._path)
        self._inputs[index] = self._keep(("inputs", index), inputs)
        return recurrence.convolve(inputs, window, weight, bias, activation, branches)

    def recur(self, call: int, kind: str, inputs: Inputs, flag: bool, branches: Branches) -> Tensor:
        """Enter the noted path into a state, and return the recurrence of new nodes, see `recurrence.FORMS`."""
        known, state = self._updates.get(call), self._state_of(call, kind)
        if not branches.known and operations.can_recur(kind, inputs, state):
            entered = None if self._path is None or known is None else (self._path, known[1])
            output, parts = operations.recur_tree(kind, inputs, flag, state, branches.parents, entered)
            updates = Updates(*parts)
        else:
            before = None
            if branches.known:
                assert known is not None
                before = known[1].first(self.num_rows, branches.known)
            elif self._path is not None and known is not None:
                self._enter_state(call, *known, self._path)
            output, updates = FORMS[kind](inputs, flag, state.float(), branches, before)
        decay, keys, values = (
            self._keep((name, call), getattr(updates, name)) for name in ("decay", "keys", "values")
        )  # fmt: skip
        rate = updates.rate
        if rate is not None and self._rows_for is not None:
            rate = self.place(("rate", call), rate[None], *rate.shape)[0].copy_(rate)
        self._updates[call] = kind, Updates(decay, keys, values, rate)
        return output


class BranchingLayer(LinearAttentionLayer):
    """transformers' layer of recurrent states, which can also verify a tree, between `begin_tree` and `end_tree`.

    Then it claims to have no previous state, and `convolve` and `recur` are called in place of the mixer's functions.
    """

    is_initialized = False  # holds no keys
    branches: Branches | None = None  # of the tree under verification
    number_of_states = 1
    has_run = False  # in the last forward over a tree

    def begin_tree(self, branches: Branches) -> None:
        """Verify a tree from now on."""
        self.branches, self.has_run, self.is_updated = branches, False, False
        self.unfollowed, self.num_recurrences = set[int](), 0
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), False)

    def end_tree(self) -> None:
        """Return to plain tokens."""
        self.branches = None

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        """Return the inputs `[B, C, N]` of a convolution, during the verification of a tree without earlier ones."""
        if self.branches is None:
            found: Tensor = super().update_conv_state(conv_states, state_idx, *args, **kwargs)
            return found
        self.has_run = True
        self.unfollowed.add(state_idx)
        _RUNNING.set((self, state_idx))
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Do nothing during the verification of a tree."""
        if self.branches is None:
            found: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
            return found
        self.is_updated = True
        return recurrent_states

    @property
    def is_followed(self) -> bool:
        """Whether the mixer has called the replaced functions for all that it has passed to the cache."""
        return not self.unfollowed and (self.num_recurrences > 0 or not self.is_updated)

    @abstractmethod
    def convolve(
        self, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """See `RecurrentState.convolve`."""

    @abstractmethod
    def recur(self, call: int, kind: str, inputs: Inputs, flag: bool) -> Tensor:
        """See `RecurrentState.recur`."""


class RecurrentLayer(BranchingLayer):
    """Layer of a `TreeCache` with recurrent states, which may be in memory that other calls use later."""

    record_past = False

    def __init__(self, state: RecurrentState) -> None:
        self.state, self.number_of_states = state, state.number
        self.conv_states, self.recurrent_states = state.windows, state.states
        self.has_previous_state = state.has_previous
        numbers = range(state.number)
        self.is_conv_states_initialized = dict.fromkeys(numbers, False)
        self.is_recurrent_states_initialized = dict.fromkeys(numbers, False)
        self.conv_kernel_size: dict[int, int | None] = dict.fromkeys(numbers)
        self.device: torch.device | None = None
        self.dtype: torch.dtype | None = None

    def lazy_initialization(
        self, conv_states: Tensor | None = None, recurrent_states: Tensor | None = None, state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:  # fmt: skip
        """Allocate memory for a state like the given one; see transformers' layer."""
        if conv_states is not None:
            self.dtype, self.device = conv_states.dtype, conv_states.device
            size = self.conv_kernel_size[state_idx] = conv_kernel_size or conv_states.shape[-1]
            name = "window", state_idx
            self.conv_states[state_idx] = self.state.place(name, conv_states, conv_states.shape[1], size)
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            sizes = recurrent_states.shape[1:]
            self.recurrent_states[state_idx] = self.state.place(("state", state_idx), recurrent_states, *sizes)
            self.is_recurrent_states_initialized[state_idx] = True

    def end_tree(self) -> None:
        """See `BranchingLayer`; the noted path has been entered, if the layer has run."""
        super().end_tree()
        self.has_previous_state = self.state.has_previous
        if self.has_run:
            self.state.forget_path()

    def convolve(
        self, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """See `RecurrentState.convolve`."""
        assert self.branches is not None
        self.has_run = True
        return self.state.convolve(index, inputs, weight, bias, activation, self.branches.on(inputs.device))

    def recur(self, call: int, kind: str, inputs: Inputs, flag: bool) -> Tensor:
        """See `RecurrentState.recur`."""
        assert self.branches is not None
        return self.state.recur(call, kind, inputs, flag, self.branches.on(self.state.device))

    def adopt(self, layer: LinearAttentionLayer) -> None:
        """Copy the states of transformers' layer."""
        for index in range(self.number_of_states):
            window, state = layer.conv_states[index], layer.recurrent_states[index]
            if layer.has_previous_state[index] and window is not None:
                self.update_conv_state(window, index)
            if layer.has_previous_state[index] and state is not None:
                self.update_recurrent_state(state, index)

    def hand_back(self, layer: LinearAttentionLayer) -> None:
        """Copy the states to transformers' layer."""
        self.state.flush()
        for index in range(self.number_of_states):
            window, state = self.conv_states[index], self.recurrent_states[index]
            if window is not None:
                if layer.has_previous_state[index]:
                    layer.conv_states[index].copy_(window)
                else:
                    layer.update_conv_state(window, index)
            if state is not None:
                layer.update_recurrent_state(state, index)


# ----------------------------------------------------------------------------------------------- replaced functions

_RUNNING: ContextVar[tuple[BranchingLayer, int] | None] = ContextVar("running_state", default=None)
"""Layer and index of the convolution that ran last in a forward over a tree in this thread."""
Running = tuple[BranchingLayer, int]


def _causal_conv1d(
    running: Running, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    layer, index = running
    layer.unfollowed.discard(index)
    return layer.convolve(index, hidden_states, weight, bias, activation)


def _recur(running: Running, kind: str, inputs: Inputs, flag: bool) -> Tensor:
    layer, _ = running
    layer.num_recurrences += 1
    return layer.recur(layer.num_recurrences - 1, kind, inputs, flag)


def _delta_rule(
    running: Running, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *_: Any,
    use_qk_l2norm_in_kernel: bool = False, **__: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    output = _recur(running, "delta_rule", (query, key, value, g, beta), use_qk_l2norm_in_kernel)
    return output, output  # in place of the state, which the layer ignores


def _mamba2(
    running: Running, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *_: Any,
    D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    return_final_states: bool = False, **__: Any,
) -> Any:  # fmt: skip
    output = _recur(running, "mamba2", (hidden_states, dt, A, B, C, D, dt_bias), dt_softplus)
    return (output, output) if return_final_states else output


def _mamba1(
    running: Running, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **_: Any,
) -> Any:  # fmt: skip
    output = _recur(running, "mamba1", (hidden_states, dt, A, B, C, D, z, delta_bias), delta_softplus)
    return (output, output) if return_last_state else output


REPLACEMENTS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv1d,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
"""Functions of transformers' modelling files, by name, and what replaces them in forwards over trees."""
_LOCK = threading.Lock()
_replaced: dict[tuple[str, str], tuple[Callable[..., Any], int]] = {}  # originals, and forwards that replace them
_names: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, str]]] = weakref.WeakKeyDictionary()


def _names_in(model: nn.Module) -> list[tuple[str, str]]:
    """Return module and name of each function to replace, in the files that define the model's parts."""
    if model not in _names:
        kinds = {kind for part in model.modules() for kind in type(part).__mro__}
        files = sorted({kind.__module__ for kind in kinds} & sys.modules.keys())
        _names[model] = [(file, name) for file in files for name in REPLACEMENTS if hasattr(sys.modules[file], name)]
    return _names[model]


def _dispatched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the original, except in this thread's forwards over trees."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        running = _RUNNING.get()
        return original(*args, **kwargs) if running is None else REPLACEMENTS[name](running, *args, **kwargs)

    return call


@contextmanager
def branching(cache: Cache, branches: Branches | None) -> Iterator[None]:
    """Let the recurrent layers of a cache verify a tree in this block; None changes nothing."""
    layers = [layer for layer in cache.layers if isinstance(layer, BranchingLayer)]
    if branches is None or not layers:
        yield
        return
    try:
        for layer in layers:
            layer.begin_tree(branches)
        yield
    finally:
        for layer in layers:
            layer.end_tree()


@contextmanager
def recurring(model: nn.Module, cache: Cache, branches: Branches | None) -> Iterator[None]:
    """Let a model's recurrent layers verify a tree in this block, in this thread only; None changes nothing.

    Functions of transformers are replaced by name in the meantime; in other threads these call the originals.

    Raises:
        UnsupportedModelError: A mixer computed something else with its states.
    """
    if branches is None or not any(isinstance(layer, BranchingLayer) for layer in cache.layers):
        yield
        return
    names = _names_in(model)
    with _LOCK:
        for file, name in names:
            space = vars(sys.modules[file])
            original, count = _replaced.get((file, name), (space[name], 0))
            if not count:
                space[name] = _dispatched(name, original)
            _replaced[file, name] = original, count + 1
    token = _RUNNING.set(None)
    try:
        with branching(cache, branches):
            yield
            for index, layer in enumerate(cache.layers):
                if isinstance(layer, BranchingLayer) and not layer.is_followed:
                    raise UnsupportedModelError(
                        f"Layer {index} of {type(model).__name__} computes its states by other functions than "
                        f"{listed([*REPLACEMENTS])}.",
                        "Use speculative=None with this model.",
                    )
    finally:
        _RUNNING.reset(token)
        with _LOCK:
            for file, name in names:
                original, count = _replaced.pop((file, name))
                if count > 1:
                    _replaced[file, name] = original, count - 1
                else:
                    setattr(sys.modules[file], name, original)
