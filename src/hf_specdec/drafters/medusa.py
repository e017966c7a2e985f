"""Medusa drafting: each head ranks the tokens of one depth, and a static tree of ranks chooses from them.

Source: Medusa (https://arxiv.org/abs/2401.10774), section 2.1.2. The heads run only on the hidden state of the last
kept node (the root if no draft is accepted); the reference implementation runs them on every node, but uses only the
result at that node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import HOW_TO_LOAD, DraftContext, Drafter, DraftSession, DraftTarget, Needs
from hf_specdec.drafters.launching import LaunchingSession, features_of
from hf_specdec.drafters.medusa_choices import tree_for_model
from hf_specdec.drafters.registry import register
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.head import bind_head
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import best_children, choice_parents, choices_budget, choices_within
from hf_specdec.trees.tree import TokenTree
from hf_specdec.validation import Choice, check_type, validate_choices
from hf_specdec.verification.features import LAST, Window
from hf_specdec.verification.model import lm_head_rows
from hf_specdec.verification.step import Step

DEFAULT_NUM_NODES = 24


@register("medusa", heads=(MedusaHeads,))
class MedusaDrafter(Drafter):
    """Drafts with Medusa heads.

    Config fields: `tree` (`"static"` or choices; default: the tree in the heads' config, else the
    authors' tree for the target's name, which is `mc_sim_7b_63` for all but Vicuna and Zephyr).
    `num_draft_tokens` (default: the heads' config, else 24), `num_steps` (depth) and `top_k` (children per node) limit
    the part of the default tree that is drafted. With choices, the first two must agree with them, and `top_k` has no
    effect.

    Args:
        heads: The heads. They are put in eval mode and their parameters are frozen; `bind` moves and casts them.
    """

    method = "medusa"
    needs = Needs(feature_layers=(LAST,))

    def __init__(self, heads: MedusaHeads) -> None:
        check_type("heads", heads, MedusaHeads, HOW_TO_LOAD)
        self.heads = heads.eval().requires_grad_(False)

    def __repr__(self) -> str:
        heads, name = self.heads.config.medusa_num_heads, self.heads.name_or_path or "this process"
        return f"MedusaDrafter({heads} heads of {name})"

    def bind(self, model: PreTrainedModel) -> None:
        """Check that the heads fit the model, then move them to its lm_head's device and cast them to its dtype.

        Raises:
            DrafterMismatchError: Hidden size or vocabulary differ, the target has no matching lm_head, or the heads'
                weights are on the meta device.
        """
        bind_head(self.heads, model)

    def choices(self, config: SpeculativeConfig) -> list[Choice]:
        """Return the tree's nodes below the root as paths of ranks; empty if the limits leave only the root.

        The order is that of the default tree, cut after the first nodes, or level by level if `config` sets the tree.

        Raises:
            InvalidConfigError: The tree is dynamic or invalid, deeper than the number of heads, uses a rank beyond the
                vocabulary, or contradicts `num_draft_tokens` or `num_steps`.
        """
        own = self.heads.config
        if config.tree == "dynamic":
            raise InvalidConfigError("'medusa' drafts a static tree, got tree='dynamic'.", 'Use tree="static".')
        given = isinstance(config.tree, tuple)
        tree: Sequence[Any] = (
            config.tree if isinstance(config.tree, tuple) else own.tree or tree_for_model(own.base_model_name_or_path)
        )
        size = config.num_draft_tokens or (None if given else own.num_draft_tokens or DEFAULT_NUM_NODES)
        depth = config.num_steps or (None if given else own.medusa_num_heads)
        paths = [tuple(path) for path in tree]
        if not given:
            paths = [path for path in paths if len(path) <= (depth or len(path))]
            paths = [path for path in paths if config.top_k is None or max(path) < config.top_k]
            paths = paths[: (size or len(paths) + 1) - 1]
        if not paths:
            return []
        validate_choices(paths)
        for name, wanted, actual in (
            ("num_draft_tokens", config.num_draft_tokens, len(paths) + 1),
            ("num_steps", config.num_steps, max(map(len, paths))),
        ):
            if given and wanted not in (None, actual):
                raise InvalidConfigError(f"The tree has {name}={actual}, got {name}={wanted}.", f"Do not set {name}.")
        if max(map(len, paths)) > own.medusa_num_heads:
            raise InvalidConfigError(
                f"The tree has depth {max(map(len, paths))}, but there are only {own.medusa_num_heads} Medusa heads."
            )
        if max(map(max, paths)) >= (own.draft_vocab_size or own.vocab_size):
            raise InvalidConfigError(f"The tree uses rank {max(map(max, paths))}, which exceeds the draft vocabulary.")
        return paths

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of the whole tree."""
        return choices_budget(self.choices(config))

    def feature_window(self, config: SpeculativeConfig) -> Window | None:
        """Return a window of one token, the last of the prompt."""
        return Window(1)

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session with the hidden state of the prompt's last token."""
        return _MedusaSession(self.heads, target.model, context, self.choices(config))


@dataclass(frozen=True, slots=True)
class _RankTree:
    """A static tree as index tensors."""

    parents: Tensor  # [N] parent of each node, root included
    depths: Tensor  # [N - 1] index of the head that drafts each node: 0 for children of the root
    ranks: Tensor  # [N - 1] rank of each node among the tokens of its head
    top_k: int  # tokens needed of each head: the largest rank + 1
    max_depth: int

    @classmethod
    def of(cls, choices: Sequence[Choice], device: torch.device) -> _RankTree:
        paths, limits = validate_choices(choices), choices_budget(choices)
        return cls(
            parents=torch.tensor(choice_parents(paths), dtype=torch.long, device=device),
            depths=torch.tensor([len(path) - 1 for path in paths], dtype=torch.long, device=device),
            ranks=torch.tensor([path[-1] for path in paths], dtype=torch.long, device=device),
            top_k=limits.top_k,
            max_depth=limits.num_steps,
        )


class _MedusaSession(LaunchingSession):
    def __init__(
        self, heads: MedusaHeads, model: PreTrainedModel, context: DraftContext, choices: list[Choice]
    ) -> None:
        if context.features is None:
            raise ValueError("A Medusa session needs the target's features of the prompt, got none.")
        super().__init__(context.roots)
        self._heads, self._choices = heads, choices
        self._lm_head = lm_head_rows(model, heads.hot_token_ids) if heads.shares_lm_head else None
        self._trees: dict[Budget, _RankTree | None] = {}
        self._features: Tensor = context.features.of((LAST,))[:, -1]  # [B, D] at the token before the root

    def _draft(self, budget: Budget) -> Draft:
        if budget not in self._trees:
            cut = choices_within(self._choices, budget)
            self._trees[budget] = _RankTree.of(cut, self._roots.device) if cut else None
        tree = self._trees[budget]
        if tree is None:
            return Draft.plain(self._roots)
        logits = self._heads(self._features.to(self._heads.device, self._heads.dtype), self._lm_head)
        log_probs, ids = best_children(logits, tree.top_k)  # [heads, B, top_k]
        ids, log_probs = ids.to(self._roots.device), log_probs.to(self._roots.device)
        hot = self._heads.hot_token_ids
        drafted = ids[tree.depths, :, tree.ranks].T  # [B, N - 1]
        tokens = drafted if hot is None else hot.to(drafted.device)[drafted]
        return Draft(
            TokenTree(torch.cat([self._roots[:, None], tokens], dim=-1), tree.parents, max_depth=tree.max_depth),
            torch.nn.functional.pad(log_probs[tree.depths, :, tree.ranks].T, (1, 0)),
        )

    def _follow(self, step: Step) -> None:
        kept, states = step.acceptance, features_of(step).of((LAST,))
        last = (kept.num_kept - 1).clamp(min=0)[:, None]
        index = kept.path.gather(1, last).clamp(min=0).to(states.device)
        self._features = states.gather(1, index[:, :, None].expand(-1, -1, states.shape[-1]))[:, 0]
