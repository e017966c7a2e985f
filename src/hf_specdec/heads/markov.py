"""Heads that condition a block drafter's logits on the previous token, and predict how likely a draft is accepted.

Source: DSpark (https://github.com/deepseek-ai/DeepSpec, `deepspec/modeling/dspark`). The correction has low rank:
`logits(next) += W2 m(W1[previous])`. DSpark draws chains; here the correction is computed for every node of a tree
(`drafters/block_tree.py`), which the tensors allow without change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MARKOV_TYPES = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """Low-rank correction of the logits, given the previous token and the slot's output.

    Tensor names are DeepSpec's. In type `gated`, a gate that also reads the slot's output scales the token's
    embedding; in type `rnn`, a recurrent state carries all previous tokens of the path.

    Args:
        config: Provides `vocab_size` V, `draft_vocab_size` Vd or None, `hidden_size` D, `markov_rank` r and
            `markov_head_type`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, rank, self.kind = config.hidden_size, config.markov_rank, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(size + 2 * rank, 3 * rank)

    def start(self, *shape: int) -> Tensor:
        """Return the state `[*shape, r]` before the first token of a path: zeros."""
        weight = self.markov_w1.weight
        return torch.zeros(*shape, weight.shape[1], dtype=weight.dtype, device=weight.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings `[..., r]` of previous tokens `[...]`, given as ids of the target."""
        embeddings: Tensor = self.markov_w1(tokens)
        return embeddings

    def mix(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the r numbers `[..., r]` that `markov_w2` maps to the correction, and the state `[..., r]` after.

        Args:
            tokens: `[...]` the previous tokens, as ids of the target.
            hidden: `[..., D]` the block's outputs that predict the tokens after them.
            state: `[..., r]` states before these tokens; only type `rnn` changes them.
        """
        embeddings = self.embed(tokens)
        if self.kind == "gated":
            embeddings = self.gate_proj(torch.cat([hidden, embeddings], dim=-1)).sigmoid() * embeddings
        if self.kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat([state, embeddings, hidden], dim=-1)).chunk(3, dim=-1)
            gate = gate.sigmoid()
            state, embeddings = gate * state + (1 - gate) * candidate.tanh(), output.tanh()
        return embeddings, state

    def forward(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the correction of the logits `[..., Vd]` after some tokens, and the state after them; see `mix`."""
        numbers, state = self.mix(tokens, hidden, state)
        correction: Tensor = self.markov_w2(numbers)
        return correction, state


class ConfidenceHead(nn.Module):
    """Logit of the probability that a drafted token is accepted if all tokens before it are.

    Args:
        input_size: D, or D + r if it also reads the Markov head's embedding of the previous token.
    """

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits `[...]` for inputs `[..., input_size]`."""
        logits: Tensor = self.proj(hidden)
        return logits.squeeze(-1)
