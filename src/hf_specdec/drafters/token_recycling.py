"""Token recycling: store the target's best candidates after each token and draft them when the token recurs.

Source: Luo et al., "Turning Trash into Treasure" (https://arxiv.org/abs/2408.08696). The best candidates at every
verified node are stored in a table, even if the node is rejected. Differences: candidates keep their probabilities,
so the tree grows along likely paths and every node has a confidence; the last two tokens are looked up before the last
one alone (as in STAND, https://arxiv.org/abs/2506.04708); nothing is drafted after unknown tokens; entries of the
accepted path are written last. Everything stays on the device.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.atomic import whole_file
from hf_specdec.config import ExecutionMode, SpeculativeConfig
from hf_specdec.drafters.base import (
    SIZES,
    Candidate,
    Candidates,
    CandidateSession,
    DraftContext,
    Drafter,
    DraftSession,
    DraftTarget,
    Needs,
)
from hf_specdec.drafters.captured_recycling import advance_captured
from hf_specdec.drafters.launching import LaunchingSession
from hf_specdec.drafters.recycled_tokens import RecycledTokens, learn, learn_on_host, recycle
from hf_specdec.drafters.registry import register
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.records import checked_path, open_regular
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import growable
from hf_specdec.validation import MAX_TOP_K, require_integer
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.graphs import Graphed
from hf_specdec.verification.model import execution_device, num_embedded_tokens
from hf_specdec.verification.step import Step

WIDTH = 8
"""Default number of candidates stored per token and per pair."""
PAIRS = 2**16
"""Default number of hash slots for pairs of tokens; a new pair overwrites the pair in its slot."""
MAX_PAIRS = 2**24
"""Maximum of `pairs`, for which the table takes about 1.7 GB with 8 candidates per slot."""
MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of the safetensors header of a saved table, which lists only five tensors."""
MIN_LOG_PROB = -4.0
"""Candidates with lower log-probabilities are not merged with those of other drafters."""
PAIR_TRUST, TOKEN_TRUST = 0.8, 0.3
"""Ratio of acceptance rate to stored probability of candidates after a pair, and of those after a single token."""


@register("token_recycling")
class TokenRecyclingDrafter(Drafter):
    """Drafts from a table of the tokens that the target found most likely after each token. Works with any model.

    The table is kept between calls; it affects the speed, never the output. Config fields: `num_draft_tokens` (default
    8), `num_steps` (4), `top_k` (4, at most `width`). `tree` is rejected.

    Args:
        width: Candidates stored per token and per pair, 1 to 1024.
        pairs: Hash slots for pairs of tokens, 1 to 2**24.
        reads_prompt: Also learn from the prompt, which requires the logits of all its positions.

    Raises:
        InvalidConfigError: `width` or `pairs` is not an integer in its range.
    """

    accepts = SIZES
    tree_from = "what it has learned"
    defaults = Budget(8, 4, 4)

    def __init__(self, *, width: int = WIDTH, pairs: int = PAIRS, reads_prompt: bool = False) -> None:
        require_integer("width", width, 1, MAX_TOP_K)
        require_integer("pairs", pairs, 1, MAX_PAIRS)
        self._width, self._pairs = width, pairs
        self.needs = Needs(prompt_logits=reads_prompt)
        self._kept: list[RecycledTokens | None] = [None]  # a list, to be shared with captured copies
        self._program: Graphed | None = None

    @property
    def table(self) -> RecycledTokens | None:
        """The learned table; None before the drafter is bound to a model."""
        return self._kept[0]

    @table.setter
    def table(self, table: RecycledTokens | None) -> None:
        self._kept[0] = table

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of the largest tree; trees are smaller while the table has few entries.

        Raises:
            InvalidConfigError: `top_k` exceeds the stored candidates.
        """
        limits = super().limits(config)
        if config.top_k is None:
            limits = replace(limits, top_k=min(limits.top_k, self._width))
        if limits.top_k > self._width:
            raise InvalidConfigError(
                f"`top_k` {limits.top_k} exceeds the {self._width} candidates stored per token.",
                "Add a TokenRecyclingDrafter with a larger `width` to the model.",
            )
        return growable(limits)

    def bind(self, model: PreTrainedModel) -> None:
        """Create an empty table, which replaces one for another vocabulary size or device; keep a table that fits."""
        size, device = num_embedded_tokens(model), execution_device(model)
        if self.table is None or self.table.vocab_size != size or self.table.keys.device != device:
            self.table = RecycledTokens(size, self._width, self._pairs, device)

    def reset(self) -> None:
        """Replace the table by an empty one; no effect before the drafter is bound to a model."""
        if self.table is not None:
            keys = self.table.keys
            self.table = RecycledTokens(self.table.vocab_size, self._width, self._pairs, keys.device)

    @property
    def copies_target_weights(self) -> bool:
        """False: it reads only the target's logits."""
        return False

    def fade(self) -> None:
        """Reduce the probabilities in the table."""
        if self.table is not None:
            self.table.fade()

    def state_dict(self) -> RecycledTokens | None:
        """Return a copy of the table; None before the drafter is bound to a model."""
        return None if self.table is None else self.table.clone()

    def load_state_dict(self, state: RecycledTokens | None) -> None:
        """Restore a table from `state_dict`; None clears the table."""
        if state is None:
            self.reset()
        else:
            self.table = state.clone()

    def save(self, path: str | Path) -> None:
        """Save the table as safetensors.

        Raises:
            InvalidConfigError: The drafter was never bound to a model, or the file cannot be written.
        """
        with whole_file(checked_path(path)) as partial:
            save_file({name: tensor.cpu() for name, tensor in self._learned().tensors().items()}, partial)

    def load(self, path: str | Path) -> None:
        """Overwrite the table with one written by `save`.

        Raises:
            InvalidConfigError: The drafter was never bound to a model.
            CheckpointFormatError: The file cannot be read, is not such a table, has other sizes or contains invalid
                values. The table is then unchanged.
        """
        mine = self._learned().tensors()
        with open_regular(checked_path(path, CheckpointFormatError), CheckpointFormatError) as file:
            header = os.fstat(file.fileno()).st_size - sum(tensor.nbytes for tensor in mine.values())
        if not 0 < header <= MAX_HEADER_BYTES:  # checked before parsing: a header could hold millions of names
            raise CheckpointFormatError(
                f"{path} is not a token-recycling table for this vocabulary, `width` and `pairs`: its size differs."
            )
        try:
            with safe_open(path, framework="pt") as stored:
                found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors raises many types for damaged files
            raise CheckpointFormatError(f"{path} is not a token-recycling table: {error}.") from error
        layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mine.items()}
        if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()} != layout:
            raise CheckpointFormatError(
                f"{path} is not a token-recycling table for this vocabulary, `width` and `pairs`.",
                f"Expected tensors {layout}.",
            )
        ids = (found["ids"], found["pair_ids"])
        if any(bool(((tensor < 0) | (tensor >= self._learned().vocab_size)).any()) for tensor in ids):
            raise CheckpointFormatError(f"{path} contains token ids outside this model's vocabulary.")
        if not all(bool((found[name] <= 0).all()) for name in ("log_probs", "pair_log_probs")):  # also False for NaN
            raise CheckpointFormatError(f"{path} contains values that are not log-probabilities.")
        for name, tensor in mine.items():
            tensor.copy_(found[name])

    def _learned(self) -> RecycledTokens:
        if self.table is None:
            raise InvalidConfigError(
                "This TokenRecyclingDrafter is not bound to a model.", "Call model.add_drafter(drafter) first."
            )
        return self.table

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session, which first learns from the prompt's logits if the context has them."""
        table = self._learned()
        on_host = table.keys.device.type == "cpu"
        return (_HostRecyclingSession if on_host else _RecyclingSession)(table, context, self._program)

    def compiled(self, model: PreTrainedModel, mode: ExecutionMode) -> TokenRecyclingDrafter:
        """Return a copy that shares the table and runs as device graphs; the drafter itself if the device has none."""
        device = execution_device(model)
        if device.type not in GRAPH_BACKENDS:
            return self
        other = copy.copy(self)
        other._program = Graphed(GRAPH_BACKENDS[device.type](device), "Token recycling")
        return other


class _RecyclingSession(LaunchingSession):
    _learn = staticmethod(learn)

    def __init__(self, table: RecycledTokens, context: DraftContext, program: Graphed | None = None) -> None:
        super().__init__(context.roots)
        self._table, self._program, ids = table, program, context.input_ids
        self._previous = ids[:, -1] if ids.shape[1] else torch.full_like(context.roots, -1)
        if context.logits is not None and ids.shape[1]:
            valid = torch.ones_like(ids, dtype=torch.bool) if context.padding is None else context.padding.valid
            before = torch.nn.functional.pad(torch.where(valid, ids, -1), (1, -1), value=-1)
            table.write(before, ids, *table.candidates(context.logits), valid)

    def launch(self, step: Step, budget: Budget) -> Sequence[Tensor]:
        """See `LaunchingSession.launch`; if captured, one graph learns from the step and drafts."""
        if self._program is None or budget.is_plain:
            return super().launch(step, budget)
        advanced = advance_captured(self._program, self._table, step, self._previous, growable(budget))
        if advanced is None:
            return super().launch(step, budget)
        draft, self._previous = advanced
        self._roots = step.acceptance.next_token
        self._note_launched(budget, draft)
        return ()

    def _draft(self, budget: Budget) -> Draft:
        return recycle(self._table, self._previous, self._roots, growable(budget))

    def _follow(self, step: Step) -> None:
        candidates, kept = self._table.candidates(step.verification.logits), step.acceptance
        self._previous = self._learn(self._table, step.draft.tree, *candidates, kept.path, self._previous)


class _HostRecyclingSession(_RecyclingSession, CandidateSession):
    """Session with a table on the CPU, which can also list the candidates of each row."""

    _learn = staticmethod(learn_on_host)

    def skim(self, step: Step) -> None:
        """Remember the last two tokens of each row; the table stays as it is."""
        if max(step.acceptance.counts) != 1 or self._is_unread:
            self.observe(step)
            return
        self._previous = torch.where(step.acceptance.num_kept > 0, self._roots, self._previous)
        self._roots = step.acceptance.next_token

    @property
    def candidates(self) -> Sequence[Candidates]:
        pairs = zip(self._previous.tolist(), self._roots.tolist(), strict=True)
        return [_RecycledCandidates(self._table, previous, token) for previous, token in pairs]


class _RecycledCandidates(Candidates):
    """Candidates of one row from a table on the CPU; a place is a pair (previous token or -1, token)."""

    def __init__(self, table: RecycledTokens, previous: int, token: int) -> None:
        self._table, self.start = table, (previous, token)

    def after(self, place: tuple[int, int]) -> Sequence[Candidate]:
        log_probs, ids, paired = self._table.row(*place)
        trusted = PAIR_TRUST if paired else TOKEN_TRUST
        return [
            Candidate(token, trusted * exp(log_prob))
            for token, log_prob in zip(ids, log_probs, strict=True)
            if log_prob > MIN_LOG_PROB
        ]

    def follow(self, place: tuple[int, int], token: int) -> tuple[int, int]:
        return place[1], token
