"""Multi-token prediction (MTP): draft with a trained module, or with the modules in the model's own checkpoint.

Sources: DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.2; FastMTP (https://arxiv.org/abs/2509.18362) for
applying one module repeatedly. A single module drafts like an EAGLE head (`drafters/eagle.py`), by default chains.
If a checkpoint has N modules, they draft a chain of up to N tokens, one token each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.checkpoints.mtp_layouts import drops_mtp, target_mtp
from hf_specdec.config import ExecutionMode, SpeculativeConfig
from hf_specdec.drafters.base import DraftContext, DraftSession, Needs
from hf_specdec.drafters.eagle import EagleDrafter, LayerDrafter, LayerFunctions
from hf_specdec.drafters.feature_session import Entries, FeatureSession, LayerLimits
from hf_specdec.drafters.registry import register
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.layer_mtp import LayerMtpHead
from hf_specdec.heads.mtp import MtpHead, NativeMtp
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.features import PromptPadding, Window, token_positions

CHAIN = Budget(16, 3, 1)
"""Default sizes of drafts with a single module; 3 steps as in FastMTP."""


@register("mtp", heads=(MtpHead, LayerMtpHead))
class MtpDrafter(EagleDrafter):
    """Drafts with a trained MTP module, applied repeatedly to its own output.

    Config fields as for EAGLE: `tree`, `num_steps`, `top_k`, `num_draft_tokens`. Defaults come from the module's
    config; without them, chains of 3 tokens are drafted. `top_k` above 1 or a static `tree` gives trees.

    Args:
        head: The module.
    """

    method = "mtp"
    defaults = CHAIN

    def __init__(self, head: MtpHead | LayerMtpHead) -> None:
        super().__init__(head)

    @staticmethod
    def native(model: PreTrainedModel) -> LayerDrafter:
        """Create a drafter with the MTP modules in the model's own checkpoint.

        Modules that transformers drops when it loads the model (Qwen3-Next, Qwen3.5) are read from the checkpoint now,
        others by `bind`.

        Raises:
            DrafterMismatchError: The model or its checkpoint has no MTP modules.
            UnsupportedModelError: The modules cannot be built or run.
            CheckpointFormatError: The checkpoint cannot be read.
        """
        return MtpDrafter(target_mtp(model)) if drops_mtp(model) else NativeMtpDrafter(model)


class NativeMtpDrafter(LayerDrafter):
    """Drafts with a model's own MTP modules; created by `MtpDrafter.native(model)`.

    A single module is applied repeatedly, like a trained one. N modules draft chains of at most N tokens, not trees.

    Args:
        model: The target, of which only the config is read until `bind`.
    """

    method = "mtp"
    defaults = CHAIN
    head: NativeMtp

    def __init__(self, model: PreTrainedModel) -> None:
        self.head = NativeMtp(model)

    def __repr__(self) -> str:
        return f"NativeMtpDrafter({self.head.config.num_layers} of {self.head.where})"

    def bind(self, model: PreTrainedModel) -> None:
        """Load the modules in the first call; move them to the lm_head's device and cast them to the model's dtype."""
        self.head.bind(model)
        self.needs = Needs(feature_layers=self.head.feature_layers, token_ids=True)

    def feature_window(self, config: SpeculativeConfig) -> Window | None:
        """See `LayerDrafter`; at least one token per module, because the last ones are read again in every step."""
        return None if config.draft_window is None else Window(max(config.draft_window, self.head.config.num_layers))

    def tree_limits(self, config: SpeculativeConfig) -> LayerLimits:
        """See `LayerDrafter.tree_limits`."""
        limits, count = super().tree_limits(config), self.head.config.num_layers
        budget = limits.budget
        if count > 1 and (budget.top_k > 1 or budget.num_steps > count):
            raise InvalidConfigError(
                f"The {count} MTP modules of {self.head.where} draft chains of at most {count} tokens, got "
                f"num_steps={budget.num_steps}, top_k={budget.top_k}.",
                "Leave tree, num_steps and top_k None.",
            )
        return limits

    def _session(self, model: PreTrainedModel, context: DraftContext, limits: LayerLimits) -> DraftSession:
        if self.head.config.num_layers == 1:
            return super()._session(model, context, limits)
        functions = LayerFunctions.of(self.head, self._stages(model), model)
        return _ModulesSession(functions, self.head, None, context, limits)

    def compiled(self, model: PreTrainedModel, mode: ExecutionMode) -> NativeMtpDrafter:
        """Return this drafter: transformers' modules run as they are."""
        return self


class _ModulesSession(FeatureSession):
    """A session with L MTP modules, which draft one token each.

    For entry t, module k (from 0) reads the token x[t+1+k] and the output of module k-1, for module 0 the target's
    feature of x[t]. The last L-1 entries therefore need drafted tokens; they are read again in every step until all
    their tokens are known. Only earlier entries, which do not depend on drafted tokens, are committed.
    """

    can_launch = False  # the host must know how many of the last entries to read again
    _functions: LayerFunctions

    def __init__(
        self, functions: LayerFunctions, head: NativeMtp, graphs: None, context: DraftContext, limits: LayerLimits
    ) -> None:
        super().__init__(functions, head, graphs, context, limits)
        self._head, self._num_layers = head, head.config.num_layers

    def propose(self, budget: Budget) -> Draft:
        """Draft a chain, see `DraftSession.propose`."""
        if budget.is_plain:
            return Draft.plain(self._roots)
        if self._prompt is not None:
            self._pending, self._prompt = [self._read_known(self._prompt), *self._pending], None
        tokens, log_probs = self._draft_chain(_aligned(Entries.joined(self._pending)))
        steps = min(budget.num_steps, budget.num_nodes - 1, self._num_layers)
        nodes = torch.arange(ROOT_PARENT, steps, device=tokens.device)
        tree = TokenTree(torch.cat([self._roots[:, None], tokens[:, :steps]], dim=-1), nodes, max_depth=steps)
        return Draft(tree, torch.nn.functional.pad(log_probs[:, :steps], (1, 0)))

    def _read_unread(self) -> None:
        """Do nothing: `propose` reads, and the last entries of a row remain unread."""

    def _read_known(self, prompt: Entries) -> Entries:
        """Run all modules on the prompt's entries except the last L-1 and commit these; return the last L-1.

        `_padding` then covers only the committed entries.
        """
        width, layers, padding = prompt.tokens.shape[1], self._num_layers, self._padding
        known = max(width - layers + 1, 0)
        device, rows = prompt.tokens.device, len(prompt.tokens)
        valid = torch.ones_like(prompt.tokens, dtype=torch.bool) if padding is None else padding.valid
        if known:
            indices = torch.arange(width, dtype=torch.long, device=device)
            distance = indices[:known, None] - indices[:known]
            visible = (distance >= 0) & valid[:, None, :known] | (distance == 0)
            if self._functions.window is not None:
                visible = visible & (distance < self._functions.window)
            positions = indices[None, :known] if padding is None else token_positions(padding)[:, :known]
            hidden = self._functions._fuse(prompt.features[:, :known])
            for layer in range(layers):
                hidden = self._run_layer(layer, prompt.tokens[:, layer : layer + known], hidden, positions, visible)
            self._cache.commit([range(known)] * rows)
        if padding is not None:
            counts = padding.counts - (~valid[:, known:]).sum(-1)
            self._padding = replace(PromptPadding.where(valid[:, :known]), counts=counts)
        nodes: Sequence[Sequence[int]] = [range(width - known)] * rows
        if self._is_padded:
            nodes = [[index for index, is_token in enumerate(row) if is_token] for row in valid[:, known:].tolist()]
        path = torch.where(valid[:, known:], torch.arange(width - known, device=device), width).sort(dim=-1).values
        return Entries(
            prompt.features[:, known:], prompt.tokens[:, known:], torch.where(path == width, -1, path), nodes
        )

    def _draft_chain(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Draft L tokens behind entries from `_aligned`; return tokens and log-probabilities `[B, L]`.

        Entries that need none of these tokens are committed; the last L-1 are kept in `_pending`.
        """
        layers, device = self._num_layers, entries.tokens.device
        counts = (entries.path >= 0).sum(-1, keepdim=True)
        indices = torch.arange(entries.tokens.shape[1], device=device)
        distance = indices[:, None] - indices
        visible = (distance >= 0)[None]  # hides the invalid entries, which come after the valid ones
        if self._functions.window is not None:
            visible = visible & (distance < self._functions.window)
        positions = self._committed().first_positions + indices
        last = (counts - 1).clamp(min=0)
        hidden, read = self._functions._fuse(entries.features), entries.tokens
        tokens, log_probs = [], []
        for layer in range(layers):
            hidden = self._run_layer(layer, read, hidden, positions, visible)
            best = self._functions.score(hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[-1])), 1)
            tokens.append(best.tokens[:, 0])
            log_probs.append(best.log_probs[:, 0])
            read = read.roll(-1, dims=1).scatter(1, last, tokens[-1])
        self._cache.commit([range(max(count - layers + 1, 0)) for count in entries.counts])
        self._pending = [_last(entries, layers - 1)]
        return torch.cat(tokens, dim=-1), torch.cat(log_probs, dim=-1)

    def _run_layer(self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Run module number `layer` over T entries and return its outputs `[B, T, D]`.

        `visible` `[B or 1, T, T]` says which of these entries each one sees, in addition to committed ones.
        """
        functions = self._functions
        positions = positions.expand(len(tokens), -1)
        places = positions if self._padding is None else positions + self._padding.counts[:, None]
        mask = self._committed().mask(places, visible, functions.window)
        output = self._head.read_layer(
            layer,
            functions.embedding(tokens).to(functions.device, functions.dtype),
            hidden.to(functions.device),
            positions.to(functions.device),
            self._cache,
            mask.to(functions.device),
        )
        return output.to(tokens.device)


def _aligned(entries: Entries) -> Entries:
    """Return the entries with the valid ones first in each row."""
    index, indices = entries.path.clamp(min=0), torch.arange(entries.path.shape[1], device=entries.path.device)
    return Entries(
        entries.features.gather(1, index[:, :, None].expand(-1, -1, entries.features.shape[-1])),
        entries.tokens.gather(1, index),
        torch.where(entries.path >= 0, indices, -1),
        [range(count) for count in entries.counts],
    )


def _last(entries: Entries, most: int) -> Entries:
    """Return the last `most` entries of each row, or all if it has fewer; `entries` come from `_aligned`."""
    counts = (entries.path >= 0).sum(-1, keepdim=True)
    index = (counts - most).clamp(min=0) + torch.arange(most, device=counts.device)
    return _aligned(
        Entries(
            entries.features,
            entries.tokens,
            torch.where(index < counts, index, -1),
            [range(min(count, most)) for count in entries.counts],
        )
    )
