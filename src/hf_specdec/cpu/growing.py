"""Grow the tree of a block drafter with a Markov head by the CPU kernel, all levels in one call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdec.cpu.operations import addresses, functions_for

KINDS = {"vanilla": 0, "gated": 1, "rnn": 2}
"""Types of Markov heads, and their numbers in `blocks.h`."""


class _Sizes(ctypes.Structure):
    """`struct BlockTree` of blocks.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "depths", "size", "vocabulary", "rank", "kind")),
        *((name, ctypes.c_int64) for name in ("nodes", "steps", "width")), ("least", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedMarkov:
    """The weights of a Markov head, arranged for the kernel. V tokens, draft vocabulary Vd, rank r, G gates."""

    kind: str
    embeddings: Tensor  # [V, r]
    outputs: Tensor  # [r, Vd]
    inner: Tensor  # [r, G] float32, the gates' weights for the embedding; if "rnn" [2r, G], the state's come first
    slot: Tensor | None  # [G, D] float32, the gates' weights for the slot's output; None if "vanilla": no gates
    bias: Tensor | None  # [G] float32

    @classmethod
    def of(cls, markov_head: Any) -> PackedMarkov:
        """Pack a `MarkovHead`; a copy of its weights, except for the embeddings."""
        kind, rank = markov_head.kind, markov_head.markov_w1.weight.shape[1]
        outputs = markov_head.markov_w2.weight.detach().T.contiguous()
        embeddings = markov_head.markov_w1.weight.detach()
        if kind == "vanilla":
            return cls(kind, embeddings, outputs, outputs.new_empty(0, dtype=torch.float32), None, None)
        projection = markov_head.joint_proj if kind == "rnn" else markov_head.gate_proj
        weight, bias = projection.weight.detach().float(), projection.bias.detach().float()
        size = weight.shape[1] - (2 * rank if kind == "rnn" else rank)
        # "gated" reads the slot's output before the token's embedding, "rnn" after it
        slot, inner = (weight[:, -size:], weight[:, :-size]) if kind == "rnn" else (weight[:, :size], weight[:, size:])
        return cls(kind, embeddings, outputs, inner.T.contiguous(), slot, bias)


def grow_corrected(
    packed: PackedMarkov, roots: Tensor, hidden: Tensor, logits: Tensor, states: Tensor, hot: Tensor | None,
    sizes: tuple[int, int, int], least: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return tokens, parents `[B, N]` and log-probabilities `[B, N]` of the edges of one dynamic tree per row.

    They are those of `trees.growth.grow_dynamic`, except for rounding: sums are float32.

    Args:
        packed: The Markov head.
        roots: `[B]` long.
        hidden: `[B, D, Dh]` the outputs that predict the tokens of each depth.
        logits: `[B, D, Vd]` their logits without corrections, supported by `operations.can_search`.
        states: `[B, 1, r]` the Markov head's states before the roots; only "rnn" reads them.
        hot: `[Vd]` target ids of the draft vocabulary; None if it is the target's.
        sizes: Most nodes with the root, most levels (at most D), and children per node (at most Vd).
        least: See `Budget.min_level_probability`.
    """
    (batch_size, depths, size), (nodes, steps, width) = logits.shape, sizes
    if steps > depths or width > size:
        raise ValueError(f"{steps} levels of {width} children need more than {depths} slots and {size} tokens.")
    logits, roots = logits.contiguous(), roots.contiguous()
    states = states.float().contiguous()
    slots = states if packed.slot is None else functional.linear(hidden.float(), packed.slot, packed.bias)
    tokens, parents = (roots.new_empty(batch_size, nodes) for _ in range(2))
    edges = slots.new_empty(batch_size, nodes)
    lengths = batch_size, depths, size, *packed.embeddings.shape, KINDS[packed.kind], nodes, steps, width, least
    given = addresses(logits, packed.embeddings, slots, packed.inner, packed.outputs, hot, roots, states)
    count = functions_for(logits.dtype).grow(
        ctypes.byref(_Sizes(*lengths)), *given, *addresses(tokens, parents, edges), torch.get_num_threads()
    )
    if not count:
        raise IndexError(
            f"A tree grows from a token that is not among the {len(packed.embeddings)} tokens of the vocabulary; its "
            f"roots are {roots.tolist()}."
        )
    return tokens[:, :count], parents[:, :count], edges[:, :count]
