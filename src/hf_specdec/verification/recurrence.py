"""Recurrent layers over a tree: every node continues the state of its parent, in one forward.

A recurrent layer keeps a state S `[Dk, Dv]` per head, and each token changes it:
`S_i = exp(decay_i) S_parent + key_i update_i^T`, with output `query_i S_i`. In linear recurrences (Mamba) the update
is a function of the token, in delta rules (Gated DeltaNet, KDA) `beta_i (value_i - key_i exp(decay_i) S_parent)`.
The updates of all nodes of a tree solve one triangular system, in which the mask of ancestors replaces the causal one
of the chunked forms (https://arxiv.org/abs/2412.06464). No node's state is computed: the output is that of the
committed state and of the ancestors' updates, each with the decays of the path down to the node.

All functions are pure: tensors in, tensors out. Decays are summed along paths, so that nothing cancels. `Updates` is
what the nodes of a tree have in store for the state; `advance` enters those of the accepted path. Letters are those of
`trees/tree.py`; H value heads share G key heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from hf_specdec.trees.tree import TokenTree

SOLVED_TOGETHER = 4
"""Rows of a triangular system that are solved by products. In larger blocks the inverse is less accurate: its terms
have alternating signs and grow with binomial coefficients if a text repeats itself."""


@dataclass(frozen=True, slots=True)
class Branches:
    """The nodes of a tree, as recurrent layers need them. The first `known` nodes have been run before."""

    parents: Tensor  # [R, N], R = B or 1
    ancestors: Tensor  # [R, N, N] bool, each node included
    known: int = 0
    _windows: dict[int, Tensor] = field(default_factory=dict)
    _copies: dict[torch.device, Branches] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: TokenTree, known: int = 0) -> Branches:
        """Describe a tree."""
        parents = tree.parents if tree.parents.dim() == 2 else tree.parents[None]
        return cls(parents, tree.ancestor_mask(), known)

    def on(self, device: torch.device) -> Branches:
        """Return the nodes on a device; the layers of a model may be on several."""
        if device == self.parents.device:
            return self
        if device not in self._copies:
            self._copies[device] = Branches(self.parents.to(device), self.ancestors.to(device), self.known)
        return self._copies[device]

    def windows(self, size: int) -> Tensor:
        """Return what a convolution over `size` tokens sees at each node, oldest first: `[R, N - known, size]`.

        These are columns of `size` committed inputs, followed by those of the nodes.

        Example: parents [-1, 0, 0] and size 3 give 1 2 3, 2 3 4, 2 3 5.
        """
        if size not in self._windows:
            column = torch.arange(self.parents.shape[1], device=self.parents.device).expand_as(self.parents) + size
            columns = [column]
            for _ in range(size - 1):
                parent = self.parents.gather(1, (column - size).clamp(min=0))
                above = torch.where(parent >= 0, parent + size, size - 1)
                column = torch.where(column >= size, above, (column - 1).clamp(min=0))
                columns.append(column)
            self._windows[size] = torch.stack(columns[::-1], dim=-1)[:, self.known :]
        return self._windows[size]


# ----------------------------------------------------------------------------------------------- convolutions


def convolve(
    inputs: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, branches: Branches
) -> Tensor:
    """Return the causal convolution `[B, C, N - known]` of each node's path.

    Args:
        inputs: `[B, C, N]` of all nodes.
        state: `[B, C, K or K - 1]` committed inputs.
        weight, bias, activation: `[C, K]`, `[C]`, and the name of a function.
        branches: The nodes.
    """
    size = weight.shape[-1]
    seen = torch.cat([functional.pad(state, (size - state.shape[-1], 0)), inputs], dim=-1).to(weight.dtype)
    columns = branches.windows(size)
    shape = *seen.shape[:2], *columns.shape[1:]
    if len(columns) == 1:
        seen = seen.index_select(2, columns.flatten())
    else:
        seen = seen.gather(2, columns.flatten(1)[:, None].expand(-1, seen.shape[1], -1))
    output = (seen.view(shape).float() * weight[:, None].float()).sum(-1)
    if bias is not None:
        output = output + bias[:, None].float()
    output = output.to(weight.dtype)
    return (output if activation is None else ACT2FN[activation](output)).to(inputs.dtype)


def advance_window(state: Tensor, inputs: Tensor, path: Tensor) -> Tensor:
    """Return the last inputs `[B, C, K]` after a path `[B, P]` (-1 after its end) of nodes with `[B, C, N]`."""
    size, counts = state.shape[-1], (path >= 0).sum(-1, keepdim=True)
    place = counts - size + torch.arange(size, device=path.device)  # in the path; negative: committed before
    node = path.gather(1, place.clamp(min=0, max=path.shape[1] - 1)) + size
    columns = torch.where(place >= 0, node, size + place)
    return torch.cat([state, inputs], dim=-1).gather(2, columns[:, None].expand(-1, state.shape[1], -1))


# ----------------------------------------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class Updates:
    """What each node of a tree adds to the state of its parent, in float32."""

    decay: Tensor  # [B, H, N] log of the factor of the state; [B, H, N, Dk] if every channel has its own
    keys: Tensor  # [B, G, N, Dk]
    values: Tensor  # [B, H, N, Dv]
    rate: Tensor | None = None  # [H, Dk], by which the decay of a channel is multiplied (Mamba 1)

    def after(self, known: Updates | None) -> Updates:
        """Return the updates of known nodes, followed by these."""
        if known is None:
            return self
        pairs = (known.decay, self.decay), (known.keys, self.keys), (known.values, self.values)
        decay, keys, values = (torch.cat(pair, dim=2) for pair in pairs)
        return Updates(decay, keys, values, self.rate)

    def first(self, rows: int, count: int | None = None) -> Updates:
        """Return the first rows, and their first `count` nodes, or all nodes."""
        decay, keys, values = (part[:rows, :, :count] for part in (self.decay, self.keys, self.values))
        return Updates(decay, keys, values, self.rate)


def advance(state: Tensor, updates: Updates, path: Tensor) -> Tensor:
    """Return the state `[B, H, Dk, Dv]` after a path `[B, P]` of nodes, with -1 after its end."""
    valid, index = (path >= 0)[:, None], path.clamp(min=0)[:, None]

    def along(part: Tensor) -> Tensor:
        where, is_node = index.expand(-1, part.shape[1], -1), valid
        if part.dim() == 4:
            where, is_node = where[..., None].expand(-1, -1, -1, part.shape[-1]), valid[..., None]
        return part.gather(2, where).masked_fill(~is_node, 0)

    decay, keys, values = along(updates.decay), along(updates.keys), along(updates.values)
    later = decay.flip(2).cumsum(2).flip(2)  # of each node and those after it
    after = functional.pad(later.movedim(2, -1)[..., 1:], (0, 1)).movedim(-1, 2)
    if decay.dim() == 3:
        later, after = later[..., None], after[..., None]
    if updates.rate is not None:
        later, after = later * updates.rate[:, None], after * updates.rate[:, None]
    weighted = _for_heads(keys, values.shape[1]) * after.exp()
    return later[:, :, 0, :, None].exp() * state + weighted.transpose(-1, -2) @ values


def _for_heads(part: Tensor, heads: int) -> Tensor:
    """Repeat `[B, G, N, D]` for the heads that share it."""
    shared = part.shape[1]
    return part[:, :, None].expand(-1, -1, heads // shared, -1, -1).reshape(len(part), heads, *part.shape[2:])


def branch(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, branches: Branches,
    known: Updates | None,
) -> tuple[Tensor, Updates]:  # fmt: skip
    """Return the outputs `[B, H, n, Dv]` of the n nodes that are not known, and the updates of all nodes.

    Args:
        query, key: `[B, G, n, Dk]`.
        value: `[B, H, n, Dv]`; the updates themselves if there is no beta.
        decay: `[B, H, n]` or `[B, H, n, Dk]`.
        beta: `[B, H, n]` of a delta rule; None: a linear recurrence.
        state: `[B, H, Dk, Dv]` committed state.
        branches: All nodes.
        known: Updates of the known nodes, if there are any.
    """
    heads, group, begin = value.shape[1], value.shape[1] // key.shape[1], branches.known
    given = Updates(decay, key, value).after(known)
    ancestors = branches.ancestors.float()[:, None]  # [R, 1, N, N]
    rows = ancestors[:, :, begin:]
    if decay.dim() == 3:
        down = rows @ given.decay[..., None]  # [B, H, n, 1] sum of the decays down to each node
        between = (rows * given.decay[:, :, None]) @ (1 - ancestors).transpose(-1, -2)
        weight = between.exp() * rows  # [B, H, n, N]
        pairs = torch.cat([key, query], dim=2) @ given.keys.transpose(-1, -2)  # [B, G, 2n, N]
        on_keys, on_queries = (_for_heads(part, heads) * weight for part in pairs.chunk(2, dim=2))
    else:
        down = rows @ given.decay  # [B, H, n, Dk]
        on_path = (rows[..., None, :] * (1 - ancestors)[:, :, None]) * rows[..., None]  # [R, 1, n, N, N]
        shape = *given.decay.shape[:2], *on_path.shape[2:4], -1
        between = (on_path.flatten(2, 3) @ given.decay).view(shape)
        weight = between.exp() * rows[..., None] * _for_heads(given.keys, heads)[:, :, None]  # [B, H, n, N, Dk]
        on_keys, on_queries = ((weight @ _for_heads(part, heads)[..., None])[..., 0] for part in (key, query))
    grown = down.exp()
    if decay.dim() == 3:  # the state is read once for keys and queries of all heads that share them
        read = torch.cat([key, query], dim=2)[:, :, None] @ state.unflatten(1, (-1, group))
        of_keys, of_queries = (grown * part for part in read.flatten(1, 2).chunk(2, dim=2))
    else:
        both = torch.cat([_for_heads(part, heads) * grown for part in (key, query)], dim=2)
        of_keys, of_queries = (both @ state).chunk(2, dim=2)
    updates = given
    if beta is not None:
        right = value - of_keys
        if known is not None:
            right = right - on_keys[..., :begin] @ known.values
        solved = solve((beta[..., None] * on_keys[..., begin:]).tril(-1), beta[..., None] * right)
        updates = Updates(decay, key, solved).after(known)
    return of_queries + on_queries @ updates.values, updates


def solve(system: Tensor, right: Tensor) -> Tensor:
    """Return u with `(I + system) u = right` for `[..., n, n]` strictly lower triangular and `[..., n, Dv]`.

    In a fixed number of products for each n, as a captured graph needs it.
    """
    solved = right[..., :0, :]
    for begin in range(0, system.shape[-1], SOLVED_TOGETHER):
        rows = slice(begin, begin + SOLVED_TOGETHER)
        part, own = right[..., rows, :], system[..., rows, rows]
        if begin:
            part = part - system[..., rows, :begin] @ solved
        part = part - own @ part  # (I + T)^-1 = (I + T^2) (I - T), because T^4 = 0
        part = part + own @ (own @ part)
        solved = torch.cat([solved, part], dim=-2)
    return solved


def branch_by_node(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, rate: Tensor, state: Tensor, branches: Branches,
    known: Updates | None,
) -> tuple[Tensor, Updates]:  # fmt: skip
    """Like `branch` for a linear recurrence with a state `[B, H, Dk, 1]`, node by node: the states are small.

    Args:
        query, key: `[B, 1, n, Dk]`.
        value: `[B, H, n, 1]`.
        step, rate: `[B, H, n]` and `[H, Dk]`; their product is the decay of each channel.
        state, branches, known: See `branch`.
    """
    updates = Updates(step, key, value, rate).after(known)
    parents = branches.parents.expand(len(state), -1) + 1
    rows = torch.arange(len(state), device=state.device)
    states = state.new_empty(len(state), parents.shape[1] + 1, *state.shape[1:3])
    states[:, 0] = state[..., 0]
    for node in range(parents.shape[1]):
        factor = (updates.decay[:, :, node, None] * rate).exp()
        added = updates.values[:, :, node] * updates.keys[:, :, node]
        states[:, node + 1] = factor * states[rows, parents[:, node]] + added
    output = states[:, branches.known + 1 :] @ query[:, 0, :, :, None]  # [B, n, H, 1]
    return output.transpose(1, 2), updates


# ----------------------------------------------------------------------------------------------- kinds

Inputs = Sequence[Tensor | None]
Form = Callable[[Inputs, bool, Tensor, Branches, Updates | None], tuple[Tensor, Updates]]
"""`form(inputs, flag, state, branches, known)`: output like transformers' function, and updates; see `branch`."""


def delta_rule(
    inputs: Inputs, normalizes: bool, state: Tensor, branches: Branches, known: Updates | None
) -> tuple[Tensor, Updates]:
    """Gated delta rule or KDA; `inputs` are query, key, value, g and beta `[B, n, heads, ...]`; returns the output.

    `normalizes`: whether queries and keys are divided by their norms.
    """
    assert inputs[0] is not None
    query, key, value, decay, beta = (_float(part).transpose(1, 2) for part in inputs)
    if normalizes:
        query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    query = query * query.shape[-1] ** -0.5
    output, updates = branch(query, key, value, decay, beta, state, branches, known)
    return output.transpose(1, 2).contiguous().to(inputs[0].dtype), updates


def mamba2(
    inputs: Inputs, has_softplus: bool, state: Tensor, branches: Branches, known: Updates | None
) -> tuple[Tensor, Updates]:
    """Mamba 2; `inputs` are x `[B, n, H, Dv]`, dt `[B, n, H]`, A `[H]`, B and C `[B, n, G, Dk]`, D and a bias `[H]`.

    As in transformers' single steps, dt is not clamped.
    """
    x, dt, rate, key, query, skip, bias = inputs
    assert x is not None
    dt = _step_sizes(dt, bias, has_softplus).transpose(1, 2)
    key, query, values = (_float(part).transpose(1, 2) for part in (key, query, x))
    decay = dt * _float(rate)[:, None]
    output, updates = branch(query, key, values * dt[..., None], decay, None, state, branches, known)
    output = output.transpose(1, 2).contiguous().to(x.dtype)
    return (output if skip is None else (output + x * skip[:, None]).to(x.dtype)), updates


def mamba1(
    inputs: Inputs, has_softplus: bool, state: Tensor, branches: Branches, known: Updates | None
) -> tuple[Tensor, Updates]:
    """Mamba 1; `inputs` are x, dt `[B, D, n]`, A `[D, Dk]`, B, C `[B, Dk, n]`, D `[D]`, z `[B, D, n]`, a bias `[D]`.

    The state is `[B, D, Dk, 1]`.
    """
    x, dt, rate, key, query, skip, gate, bias = inputs
    assert x is not None
    dt = _step_sizes(dt, None if bias is None else bias[:, None], has_softplus)
    key, query = (_float(part).transpose(1, 2)[:, None] for part in (key, query))
    values = (dt * _float(x))[..., None]
    output, updates = branch_by_node(query, key, values, dt, _float(rate), state, branches, known)
    output = output[..., 0].to(x.dtype)
    if skip is not None:
        output = output + x * skip[:, None]
    return (output if gate is None else output * functional.silu(gate)).to(x.dtype), updates


def _float(part: Tensor | None) -> Tensor:
    assert part is not None
    return part.float()


def _step_sizes(dt: Any, bias: Tensor | None, has_softplus: bool) -> Tensor:
    """Return dt as transformers' single steps compute it: in its own dtype, then float32."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return _float(functional.softplus(dt) if has_softplus else dt)


FORMS: Mapping[str, Form] = {"delta_rule": delta_rule, "mamba2": mamba2, "mamba1": mamba1}
"""Kinds of recurrences, by name."""
