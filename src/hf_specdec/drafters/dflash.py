"""Block drafting: one forward of a head drafts all levels of a tree, without a sequence of draft forwards.

Sources: DFlash (https://github.com/z-lab/dflash) for the block, JetSpec (https://github.com/hao-ai-lab/JetSpec) for
trees from one block, DSpark (https://github.com/deepseek-ai/DeepSpec) for the Markov and confidence heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import ExecutionMode, SpeculativeConfig
from hf_specdec.drafters.base import HOW_TO_LOAD, DraftContext, DraftSession, DraftTarget
from hf_specdec.drafters.block_tree import BlockOutputs, grow_block
from hf_specdec.drafters.draft_layer import Entries
from hf_specdec.drafters.eagle import LayerDrafter, bind_sharing_head
from hf_specdec.drafters.feature_session import FeatureSession, LayerLimits
from hf_specdec.drafters.launching import features_of
from hf_specdec.drafters.registry import register
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.block import block_masks
from hf_specdec.heads.captured_block import GraphBlockHead
from hf_specdec.heads.compiled_block import CompiledBlockHead, WrappedBlockHead
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.layer import AcceptedStep
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import TreeShape, growable
from hf_specdec.trees.product import reachable
from hf_specdec.validation import check_type
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.masks import committed_slots
from hf_specdec.verification.model import lm_head_rows
from hf_specdec.verification.step import UnreadStep
from hf_specdec.verification.window import token_positions

DEFAULT_TOP_K = 4


@register("dflash", heads=(DFlashHead,))
class DFlashDrafter(LayerDrafter):
    """Drafts with a block head: DFlash, JetSpec, DSpark.

    Config fields: `tree` (`"dynamic"`, `"static"` or choices), `num_steps`, `top_k`, `num_draft_tokens`. Defaults come
    from the head's config; without them, the tree is dynamic with 16 nodes, `top_k` 4 and as many steps as a trained
    block drafts. With fewer steps the block has fewer slots. A chain is `top_k` 1.

    Args:
        head: The head. It is put in eval mode and its parameters are frozen; `bind` moves and casts it.
        confidence_threshold: Drop drafted tokens behind the first one whose predicted probability of being accepted
            is below this, 0 to 1; 0 keeps all. Needs a confidence head (DSpark).

    Raises:
        InvalidConfigError: A threshold outside 0 to 1, or a head without a confidence head.
    """

    method = "dflash"
    default_top_k = DEFAULT_TOP_K
    head: DFlashHead
    program: DFlashHead | WrappedBlockHead | None = None  # type: ignore[assignment]

    def __init__(self, head: DFlashHead, confidence_threshold: float = 0.0) -> None:
        check_type("head", head, DFlashHead, HOW_TO_LOAD)
        if not 0 <= confidence_threshold <= 1:
            raise InvalidConfigError(f"`confidence_threshold` must be from 0 to 1, got {confidence_threshold}.")
        if confidence_threshold and not head.config.confidence_head:
            raise InvalidConfigError(
                f"`confidence_threshold` must be 0, got {confidence_threshold}: this head has no confidence head.",
                "Leave it out.",
            )
        self.head = head.eval().requires_grad_(False)
        self.confidence_threshold = confidence_threshold

    def __repr__(self) -> str:
        return f"DFlashDrafter({type(self.head).__name__} of {self.head.name_or_path or 'this process'})"

    @property
    def default_num_steps(self) -> int:  # type: ignore[override]
        """As many tokens as a block of the trained size drafts."""
        return int(self.head.config.max_depth)

    def largest(self, budget: Budget) -> Budget:
        """See `LayerDrafter.largest`; all children of a node are candidates, unless a Markov head scores them."""
        return growable(budget) if self.head.config.markov_rank else reachable(budget)

    def tree_limits(self, config: SpeculativeConfig) -> LayerLimits:
        """See `LayerDrafter.tree_limits`.

        Raises:
            InvalidConfigError: As there, or the tree is deeper than a block of the trained size.
        """
        limits, deepest = super().tree_limits(config), self.head.config.max_depth
        if limits.budget.num_steps > deepest:
            raise InvalidConfigError(
                f"A block of {self.head.config.block_size} slots drafts at most {deepest} tokens, got "
                f"num_steps={limits.budget.num_steps}.",
                f"Set num_steps to {deepest} or less.",
            )
        return limits

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session; it reads the prompt's features in its first `propose`, and needs no token ids."""
        return self._session(target.model, context, self.tree_limits(config))

    def compiled(self, model: PreTrainedModel, mode: ExecutionMode) -> DFlashDrafter:
        """See `Drafter.compiled`; if the device has graphs, one graph reads a step, runs the block, grows the tree."""
        lm_head = lm_head_rows(model, self.head.hot_token_ids) if self.head.shares_lm_head else None
        other, device = copy.copy(self), self.head.device
        program: DFlashHead | CompiledBlockHead
        program = self.head if mode == "cuda_graph" else CompiledBlockHead.of(self.head, lm_head, mode)
        other.program = program
        if device.type not in GRAPH_BACKENDS:
            return other
        hot, threshold = self.head.hot_token_ids, self.confidence_threshold

        def grow(roots: Tensor, slots: Tensor, shape: TreeShape) -> Draft:
            return grow_block(BlockOutputs(program, roots, slots, lm_head, hot), shape, threshold)

        other.program = GraphBlockHead(program, grow, GRAPH_BACKENDS[device.type](device))
        return other

    def bind(self, model: PreTrainedModel) -> None:
        """See `Drafter.bind`."""
        self.needs = bind_sharing_head(self.head, model)

    def _session(self, model: PreTrainedModel, context: DraftContext, limits: LayerLimits) -> DraftSession:
        return _DFlashSession(self, model, context, limits)


class _DFlashSession(FeatureSession):
    """A session whose cache holds the context of the committed tokens; a block is appended and rolled back."""

    _head: DFlashHead | WrappedBlockHead

    def __init__(
        self, drafter: DFlashDrafter, model: PreTrainedModel, context: DraftContext, limits: LayerLimits
    ) -> None:
        super().__init__(drafter.program or drafter.head, model, context, limits)
        self._threshold = drafter.confidence_threshold

    def _draft(self, budget: Budget) -> Draft:
        self._read_unread()
        shape = self._shape(budget)
        size = self._block_size(budget)
        draft = self._head.draft(self._roots, self._padding, shape, size, self._cache, self._embedding)
        if draft is not None:
            return draft
        slots = self._read_block(size)
        outputs = BlockOutputs(self._head, self._roots, slots, self._lm_head, self._hot_token_ids)
        return grow_block(outputs, shape, self._threshold)

    def launch(self, step: UnreadStep, budget: Budget) -> Sequence[Tensor]:
        """See `LaunchingSession.launch`; if the head is captured, one graph reads the step and drafts."""
        if self._prompt is not None or self._pending:
            return super().launch(step, budget)
        kept, lengths = step.acceptance, list(self._cache.lengths)
        accepted = AcceptedStep(features_of(step), kept.path, kept.tokens, kept.next_token, self._padding)
        shape, size = self._shape(budget), self._block_size(budget)
        draft = self._head.draft_behind(accepted, shape, size, self._cache, self._embedding)
        if draft is None:
            return super().launch(step, budget)
        self._known_lengths, self._roots = lengths, kept.next_token
        self._note_launched(budget, draft)
        return ()

    def _shape(self, budget: Budget) -> TreeShape:
        budget = budget.within(self._limits.budget)
        return reachable(budget) if self._limits.choices is None else self._levels(budget)

    def _block_size(self, budget: Budget) -> int:
        """Return the slots of the block: as many as the largest tree needs, or as this one does if the head is causal.

        The outputs of a causal block do not depend on later slots.
        """
        config, largest = self._head.config, self._limits.budget
        depth = min(budget.num_steps, largest.num_steps) if config.causal else largest.num_steps
        return depth + (not config.sample_from_anchor)

    def _read_block(self, size: int) -> Tensor:
        """Run a block of `size` slots behind the committed tokens and return its outputs `[B, size, D]`."""
        device, batch_size = self._device, len(self._roots)
        slots = torch.arange(size, dtype=torch.long, device=self._roots.device)
        tokens = torch.where(slots == 0, self._roots[:, None], self._head.config.mask_token_id)
        positions = self._first_positions(batch_size) + slots
        outputs = self._head.read(
            self._embedding(tokens).to(device, self._dtype), positions.to(device), self._cache, self._masks(size)
        )
        self._cache.rollback()
        return outputs

    def _masks(self, size: int) -> Sequence[Tensor]:
        """Return one mask `[B, 1, S, start + S]` per layer for a block of S slots behind the committed tokens."""
        lengths = self._cache.lengths_on(self._roots.device, len(self._roots))
        visible = committed_slots(lengths, self._cache.start, self._padding)
        masks = []
        for seen, block in block_masks(self._head, visible, lengths, size):
            masks.append(torch.cat([seen, block.expand(len(seen), -1, -1)], dim=-1)[:, None].to(self._device))
        return masks

    def _read_prompt(self, prompt: Entries) -> None:
        positions = torch.arange(prompt.path.shape[1], dtype=torch.long, device=prompt.path.device)[None]
        if self._padding is not None:
            positions = token_positions(self._padding)
        self._append(prompt, positions)

    def _read_steps(self, entries: Entries) -> None:
        indices = torch.arange(entries.path.shape[1], dtype=torch.long, device=entries.path.device)
        valid = (entries.path[:, :, None] == indices).any(1)  # [B, T]
        rows = self._first_positions(len(valid))
        self._append(entries, rows + (valid.cumsum(-1) - 1).clamp(min=0))

    def _append(self, entries: Entries, positions: Tensor) -> None:
        device, rows = self._device, len(entries.path)
        features = entries.features.to(device, self._dtype)
        self._head.append_context(features, positions.expand(rows, -1).to(device), self._cache)
        self._commit(entries)
