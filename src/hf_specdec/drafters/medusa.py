"""Medusa drafting: every head ranks the tokens of one depth, and a static tree of ranks is filled in.

Source: Medusa (https://arxiv.org/abs/2401.10774), section 2.1.2. The heads run on the accepted node only: the
reference runs them on every node of the tree and then looks at one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.accept import Acceptance
from hf_specdec.config import Choice, SpeculativeConfig, validate_choices
from hf_specdec.drafters.base import Drafter, DraftSession, Prompt, fit_head
from hf_specdec.drafters.medusa_choices import tree_for_model
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.target.features import LAST
from hf_specdec.target.model import lm_head_rows
from hf_specdec.target.target import Verification
from hf_specdec.tree import TokenTree, choice_parents

DEFAULT_NUM_NODES = 24


class MedusaDrafter(Drafter):
    """Drafts with Medusa heads.

    Config fields: `tree` (`"static"` or choices; the heads' own, else the authors' for the model), and, to cut that
    list down, `num_draft_tokens` (default: the heads' own, else 24), `num_steps` (depth) and `top_k` (children per
    node).

    Args:
        heads: The heads; they are moved next to the target's lm_head when they are loaded for a model.
    """

    method = "medusa"
    feature_layers = (LAST,)

    def __init__(self, heads: MedusaHeads) -> None:
        self.heads = heads.eval().requires_grad_(False)

    def __repr__(self) -> str:
        return (
            f"MedusaDrafter({self.heads.config.medusa_num_heads} heads of {self.heads.name_or_path or 'this process'})"
        )

    def check_target(self, model: PreTrainedModel) -> None:
        """Compare sizes, then move the heads next to the target's lm_head.

        Raises:
            DrafterMismatchError: Another hidden size or vocabulary, or no lm_head.
        """
        fit_head(self.heads, model)

    def choices(self, config: SpeculativeConfig) -> list[Choice]:
        """The tree's nodes as ranks, level by level.

        Raises:
            InvalidConfigError: A dynamic tree, or one deeper than there are heads or wider than the vocabulary.
        """
        own = self.heads.config
        if config.tree == "dynamic":
            raise InvalidConfigError("Medusa's heads draft a static tree, got tree='dynamic'.", 'Use tree="static".')
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
        sorted_paths = validate_choices(paths)
        for name, wanted, actual in (
            ("num_draft_tokens", config.num_draft_tokens, len(paths) + 1),
            ("num_steps", config.num_steps, max(map(len, paths))),
        ):
            if given and wanted not in (None, actual):
                raise InvalidConfigError(f"The tree has {name} {actual}, got {name}={wanted}.", f"Leave {name} None.")
        if max(map(len, paths)) > own.medusa_num_heads:
            raise InvalidConfigError(
                f"The tree is {max(map(len, paths))} deep, there are {own.medusa_num_heads} Medusa heads."
            )
        if max(map(max, paths)) >= (own.draft_vocab_size or own.vocab_size):
            raise InvalidConfigError(f"The tree asks for rank {max(map(max, paths))}, beyond the draft vocabulary.")
        return sorted_paths

    def num_nodes(self, config: SpeculativeConfig) -> int:
        """Nodes of every tree."""
        return len(self.choices(config)) + 1

    def start(self, model: PreTrainedModel, prompt: Prompt, config: SpeculativeConfig) -> DraftSession:
        """A session at the prompt's last feature."""
        return _MedusaSession(self.heads, model, prompt, self.choices(config))


class _MedusaSession(DraftSession):
    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, prompt: Prompt, choices: list[Choice]) -> None:
        if prompt.features is None:
            raise ValueError("a Medusa session needs the prompt's features")
        self._heads, device = heads, prompt.roots.device
        self._lm_head = lm_head_rows(model, heads.hot_token_ids) if heads.shares_lm_head else None
        self._parents = torch.tensor(choice_parents(choices), device=device)
        self._depths = torch.tensor([len(path) - 1 for path in choices], dtype=torch.long, device=device)
        self._ranks = torch.tensor([path[-1] for path in choices], dtype=torch.long, device=device)
        self._top_k = 1 + max((rank for path in choices for rank in path), default=0)
        self._features: Tensor = prompt.features[:, -1]  # [B, D] of the node before the root
        self._roots = prompt.roots

    def propose(self) -> TokenTree:
        if not len(self._ranks):
            return TokenTree(self._roots[:, None], self._parents)
        logits = self._heads(self._features.to(self._heads.device, self._heads.dtype), self._lm_head)
        ids = logits.topk(self._top_k, dim=-1).indices.to(self._roots.device)  # [K, B, top_k]
        hot = self._heads.hot_token_ids
        drafted = ids[self._depths, :, self._ranks].T  # [B, N - 1]
        tokens = drafted if hot is None else hot.to(drafted.device)[drafted]
        return TokenTree(torch.cat([self._roots[:, None], tokens], dim=-1), self._parents)

    def observe(self, acceptance: Acceptance, verification: Verification) -> None:
        if verification.features is None:
            raise ValueError("a Medusa session needs the features of every verification")
        last = torch.tensor(
            [path[-1] if path else 0 for path in acceptance.nodes], device=verification.features.device
        )
        rows = torch.arange(len(last), device=last.device)
        self._features = verification.features[rows, last]
        self._roots = acceptance.next_token
