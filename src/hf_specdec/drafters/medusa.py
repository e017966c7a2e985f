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
    defaults = Budget(24, 4, 10)  # only the nodes: the default tree determines the rest
    needs = Needs(feature_layers=(LAST,))

    def __init__(self, heads: MedusaHeads) -> None:
        check_type("heads", heads, MedusaHeads, HOW_TO_LOAD)
        self.heads = heads.eval().requires_grad_(False)

    def __repr__(self) -> str:
        heads, name = self.heads.config.medusa_num_heads, self.heads.name_or_path or "this process"
        return f"MedusaDrafter({heads} heads of {name})"

    def bind(self, model: PreTrainedModel) -> None:
        """See `bind_head`."""
        bind_head(self.heads, model)

    def choices(self, config: SpeculativeConfig) -> list[Choice]:
        """Return the tree's nodes below the root as paths of ranks; empty if the limits leave only the root.

        The order is that of the default tree, cut after the first nodes, or level by level if `config` sets the tree.
        """
        own = self.heads.config
        if config.tree == "dynamic":
            raise InvalidConfigError("'medusa' drafts a static tree, got tree='dynamic'.", 'Use tree="static".')
        given = isinstance(config.tree, tuple)
        tree: Sequence[Any] = (
            config.tree if isinstance(config.tree, tuple) else own.tree or tree_for_model(own.base_model_name_or_path)
        )
        size = config.num_draft_tokens or (None if given else own.num_draft_tokens or self.defaults.num_nodes)
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


_TREES = {
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 "
        "004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 "
        "16 070 "
    ),
    "vicuna_7b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 "
        "7 030 0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 "
        "050 31 0020 70 14 "
    ),
    "vicuna_7b_stage1": (
        "0 00 1 2 01 10 3 02 4 000 03 5 20 04 6 05 11 001 7 30 06 8 9 010 07 08 40 002 12 09 21 50 100 003 13 "
        "020 011 004 60 14 005 22 030 31 006 70 15 101 200 007 80 0000 41 012 040 90 021 23 16 008 050 32 51 "
    ),
    "vicuna_7b_stage1_ablation": (
        "0 00 1 000 01 10 2 02 001 3 03 010 20 002 04 4 0000 100 11 003 020 05 5 30 011 06 6 004 12 0001 40 005 "
        "07 08 030 0010 101 7 200 006 21 012 50 021 09 0002 040 8 13 007 0100 110 60 9 008 009 050 0020 102 013 "
        "0003 300 31 "
    ),
    "vicuna_13b_stage2": (
        "0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12 "
        "0010 030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 "
        "013 102 0011 300 1000 "
    ),
    "vicuna_13b_stage1": (
        "0 00 1 01 2 10 000 02 3 03 4 20 04 001 05 5 11 010 6 06 002 7 30 8 07 08 100 003 40 12 9 09 21 020 "
        "004 13 011 005 50 030 0000 006 60 14 200 012 31 040 101 22 007 15 70 008 80 050 009 021 110 013 41 "
        "23 16 "
    ),
    "vicuna_33b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 "
        "030 005 0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 "
        "009 31 102 22 "
    ),
    "vicuna_33b_stage1": (
        "0 1 00 2 01 3 10 4 02 5 03 000 6 04 20 7 11 05 30 8 9 06 07 001 12 40 010 08 09 21 002 50 13 003 100 "
        "14 60 020 31 22 004 70 011 15 41 005 030 90 80 16 006 23 012 32 040 200 17 101 007 51 24 008 021 "
    ),
    "zephyr_stage2": (
        "0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 "
        "011 004 0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 "
        "0010 41 23 "
    ),
}
"""The static trees that the Medusa authors published for their models.

Source: `medusa/model/medusa_choices.py` of FasterDecoding/Medusa (Apache-2.0). A word is a path of ranks: `"012"` is
`(0, 1, 2)`. Words are in the order in which the authors' search added them, so the first n words always form a tree.
In stage 1 (Medusa-1) only the heads were trained, in stage 2 (Medusa-2) also the model.
"""

_BY_MODEL = {
    "vicuna-7b": "vicuna_7b_stage2",
    "vicuna-13b": "vicuna_13b_stage2",
    "vicuna-33b": "vicuna_33b_stage2",
    "zephyr": "zephyr_stage2",
}

PAPER_TREES = tuple(_TREES)
"""Names of the trees that `paper_tree` returns."""


def paper_tree(name: str) -> list[Choice]:
    """Return a published tree as paths of ranks, most useful first.

    Example: `paper_tree("zephyr_stage2")[:3]` is `[(0,), (0, 0), (1,)]`.
    """
    if name not in _TREES:
        raise InvalidConfigError(f"Unknown paper tree {name!r}.", f"Choose from {', '.join(PAPER_TREES)}.")
    return [tuple(map(int, word)) for word in _TREES[name].split()]


def tree_for_model(base_model: str | None) -> list[Choice]:
    """Return the authors' tree for a model, found by part of its name; default `mc_sim_7b_63`, as in their code."""
    names = [tree for part, tree in _BY_MODEL.items() if part in (base_model or "").lower()]
    return paper_tree(names[0] if names else "mc_sim_7b_63")
