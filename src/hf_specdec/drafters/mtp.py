"""MTP drafting: with a trained module, or with the modules that a model's own checkpoint brings.

Sources: DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.2; FastMTP (https://arxiv.org/abs/2509.18362) for
one module that is applied again and again. One module drafts as an EAGLE head does (`drafters/eagle.py`): chains
unless trees are asked for. Several native modules, one for each place ahead, draft chains as deep as they are many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import DraftContext, DraftSession, Needs
from hf_specdec.drafters.draft_layer import Entries
from hf_specdec.drafters.eagle import EagleDrafter, LayerDrafter
from hf_specdec.drafters.layer_session import RESERVED_SLOTS, EagleSession, EagleTreeShape
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.mtp import MtpHead
from hf_specdec.heads.native_mtp import NativeMtp
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.masks import PromptPadding

MTP_STEPS = 3
"""Depth of a draft with one module where nothing else is said: FastMTP's."""


class MtpDrafter(EagleDrafter):
    """Drafts with a trained MTP module, applied to its own output at every step.

    Config fields as for EAGLE: `tree`, `num_steps`, `top_k`, `num_draft_tokens`; what is None comes from the module's
    config, else it is a chain of 3 (top 1). With `top_k` above 1 or `tree` it drafts trees.

    Args:
        head: The module.
    """

    method = "mtp"
    default_num_steps, default_top_k = MTP_STEPS, 1

    def __init__(self, head: MtpHead) -> None:
        super().__init__(head)

    @staticmethod
    def native(model: PreTrainedModel) -> NativeMtpDrafter:
        """A drafter with the MTP modules that the model's own checkpoint brings; they are loaded when it is bound.

        Raises:
            DrafterMismatchError: The model has none.
            UnsupportedModelError: Modules of a kind that is not run here, or that transformers cannot build.
        """
        return NativeMtpDrafter(model)


class NativeMtpDrafter(LayerDrafter):
    """Drafts with a model's own MTP modules; make it by `MtpDrafter.native(model)`.

    One module is applied to its own output at every step, as a trained one. Of several, each foresees one more token:
    they draft a chain no deeper than they are many, and no trees.

    Args:
        model: The target.
    """

    method = "mtp"
    default_num_steps, default_top_k = MTP_STEPS, 1
    head: NativeMtp

    def __init__(self, model: PreTrainedModel) -> None:
        self.head = NativeMtp(model)

    def __repr__(self) -> str:
        return f"NativeMtpDrafter({self.head.config.num_layers} of {self.head.where})"

    def bind(self, model: PreTrainedModel) -> None:
        """Load the modules at the first time, and move them next to the target's lm_head.

        Raises:
            DrafterMismatchError: Another model, or a checkpoint without the modules.
        """
        self.head.bind(model)
        self.needs = Needs(feature_layers=self.head.feature_layers)

    def shape(self, config: SpeculativeConfig) -> EagleTreeShape:
        """See `LayerDrafter.shape`.

        Raises:
            InvalidConfigError: A tree, or more steps than there are modules, where there are several.
        """
        shape, count = super().shape(config), self.head.config.num_layers
        limits = shape.limits
        if count > 1 and (limits.top_k > 1 or limits.num_steps > count):
            raise InvalidConfigError(
                f"The {count} MTP modules of {self.head.where} draft chains of at most {count} tokens, asked for are "
                f"num_steps={limits.num_steps}, top_k={limits.top_k}.",
                "Leave tree, num_steps and top_k None.",
            )
        return shape

    def _session(self, model: PreTrainedModel, context: DraftContext, shape: EagleTreeShape) -> DraftSession:
        if self.head.config.num_layers == 1:
            return super()._session(model, context, shape)
        return _ModulesSession(self.head, model, context, shape)


class _ModulesSession(EagleSession):
    """Several modules over one text.

    Module k reads entry t as the output of module k-1 there with the token x[t+1+k], so the last L-1 entries of a
    text lack tokens that only a draft gives them. They are read again in every step and never committed; all before
    them are the same for every continuation.
    """

    can_launch = False  # the last entries are read again, and the host must know how many they are
    _head: NativeMtp

    def __init__(self, head: NativeMtp, model: PreTrainedModel, context: DraftContext, shape: EagleTreeShape) -> None:
        super().__init__(head, model, context, shape)
        self._num_layers = head.config.num_layers
        self._cache = TreeCache([None] * self._num_layers, capacity=0, reserve=RESERVED_SLOTS)

    def propose(self, budget: Budget) -> Draft:
        if budget.is_plain:
            return Draft.plain(self._roots)
        if self._prompt is not None:
            self._pending, self._prompt = [self._read_beginning(self._prompt), *self._pending], None
        tokens, log_probs = self._draft_chain(_aligned(Entries.joined(self._pending)))
        steps = min(budget.num_steps, budget.num_nodes - 1, self._num_layers)
        nodes = torch.arange(ROOT_PARENT, steps, device=tokens.device)
        tree = TokenTree(torch.cat([self._roots[:, None], tokens[:, :steps]], dim=-1), nodes, max_depth=steps)
        return Draft(tree, torch.nn.functional.pad(log_probs[:, :steps], (1, 0)))

    def _read_beginning(self, prompt: Entries) -> Entries:
        """Commit all of the prompt but its last L-1 entries, which are returned."""
        width, layers, padding = prompt.tokens.shape[1], self._num_layers, self._padding
        known = max(width - layers + 1, 0)
        device, rows = prompt.tokens.device, len(prompt.tokens)
        valid = torch.ones_like(prompt.tokens, dtype=torch.bool) if padding is None else padding.valid
        if known:
            behind = torch.arange(known, device=device)[:, None] - torch.arange(known, device=device)
            visible = (behind >= 0) & valid[:, None, :known] | (behind == 0)
            if self._window is not None:
                visible = visible & (behind < self._window)
            positions = (valid[:, :known].cumsum(-1) - 1).clamp(min=0)
            hidden = self._fuse(prompt.features[:, :known])
            for layer in range(layers):
                hidden = self._run_layer(layer, prompt.tokens[:, layer : layer + known], hidden, positions, visible)
            path = torch.arange(known, device=device).expand(rows, -1)
            self._cache.commit(path, [range(known)] * rows)
        self._padding = None if padding is None else PromptPadding.where(valid[:, :known])
        places = torch.arange(width - known, device=device)
        nodes: Sequence[Sequence[int]] = [range(width - known)] * rows
        if padding is not None:
            nodes = [[place for place, real in enumerate(row) if real] for row in valid[:, known:].tolist()]
        path = torch.where(valid[:, known:], places, width).sort(dim=-1).values
        return Entries(
            prompt.features[:, known:], prompt.tokens[:, known:], torch.where(path == width, -1, path), nodes
        )

    def _draft_chain(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """The L next tokens and their log-probabilities `[B, L]`; what a draft cannot change is committed.

        Args:
            entries: Each row's own at its beginning, in order.
        """
        layers, device = self._num_layers, entries.tokens.device
        counts = (entries.path >= 0).sum(-1, keepdim=True)
        places = torch.arange(entries.tokens.shape[1], device=device)
        behind = places[:, None] - places
        visible = (behind >= 0)[None]  # a row's own come first: what is behind them, they do not see
        if self._window is not None:
            visible = visible & (behind < self._window)
        positions = self._first_positions(len(counts)) + places
        last = (counts - 1).clamp(min=0)
        hidden, read = self._fuse(entries.features), entries.tokens
        tokens, log_probs = [], []
        for layer in range(layers):
            hidden = self._run_layer(layer, read, hidden, positions, visible)
            foreseen = self._score(hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[-1])), 1)
            tokens.append(foreseen.tokens[:, 0])
            log_probs.append(foreseen.log_probs[:, 0])
            read = read.roll(-1, dims=1).scatter(1, last, tokens[-1])
        known = counts - layers + 1
        self._cache.commit(
            torch.where(places < known, places, -1), [range(max(count - layers + 1, 0)) for count in entries.counts]
        )
        self._pending = [_last(entries, layers - 1)]
        return torch.cat(tokens, dim=-1), torch.cat(log_probs, dim=-1)

    def _run_layer(self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """See `EagleSession._run`."""
        mask, device = self._mask(positions, visible, len(tokens)), self._head.device
        assert mask is not None
        embeddings = self._embedding(tokens).to(device, self._head.dtype)
        output = self._head.read_layer(
            layer,
            embeddings,
            hidden.to(device),
            positions.expand(len(tokens), -1).to(device),
            self._cache,
            mask,
        )
        return output.to(tokens.device)


def _aligned(entries: Entries) -> Entries:
    """The same, with each row's own entries at its beginning."""
    index, places = entries.path.clamp(min=0), torch.arange(entries.path.shape[1], device=entries.path.device)
    return Entries(
        entries.features.gather(1, index[:, :, None].expand(-1, -1, entries.features.shape[-1])),
        entries.tokens.gather(1, index),
        torch.where(entries.path >= 0, places, -1),
        [range(count) for count in entries.counts],
    )


def _last(entries: Entries, most: int) -> Entries:
    """At most so many of the last entries of each row.

    Args:
        entries: Each row's own at its beginning.
    """
    counts = (entries.path >= 0).sum(-1, keepdim=True)
    places = torch.arange(most, device=counts.device)
    index = (counts - most).clamp(min=0) + places
    return _aligned(
        Entries(
            entries.features,
            entries.tokens,
            torch.where(index < counts, index, -1),
            [range(min(count, most)) for count in entries.counts],
        )
    )
