"""EAGLE drafting: grow a tree of tokens level by level with the draft layer, and keep its likeliest nodes.

Sources: EAGLE (https://arxiv.org/abs/2401.15077) for static trees, EAGLE-2 (https://arxiv.org/abs/2406.16858) for
the dynamic tree. Entry t of the draft cache pairs the target's feature of x[t] with the embedding of x[t+1]. Entries
from true features are committed; entries made while a tree grows are forgotten with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.accept import Acceptance
from hf_specdec.config import Choice, SpeculativeConfig, validate_choices
from hf_specdec.drafters.base import Drafter, DraftSession, Prompt, fit_head
from hf_specdec.errors import InvalidConfigError, UnsupportedGenerationError
from hf_specdec.heads.attention import attend_over
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.target.cache import TreeCache
from hf_specdec.target.features import FeatureTap
from hf_specdec.target.masks import committed_slots
from hf_specdec.target.model import lm_head_rows
from hf_specdec.target.target import Verification
from hf_specdec.tree import ROOT_PARENT, TokenTree, choice_parents

RESERVED_SLOTS = 512
"""Of the draft layer's cache, behind the text."""
DEFAULT_NUM_STEPS = 4
DEFAULT_TOP_K = 4
DEFAULT_NUM_NODES = 16
DEFAULT_CHOICES: tuple[Choice, ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (2, 0),
    (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1),
)  # fmt: skip
"""The static tree of `tree="static"` where the head brings none: wide at the top, deep below the best child."""


@dataclass(frozen=True, slots=True)
class EagleTreeShape:
    """The tree one generation grows: a static one (choices), or a dynamic one (the other three)."""

    num_steps: int
    top_k: int
    num_nodes: int
    choices: tuple[Choice, ...] | None


class EagleDrafter(Drafter):
    """Drafts with an EAGLE head: version 1/2, which shares the target's embedding and lm_head, or 3.

    Config fields: `tree` (`"dynamic"`, `"static"` or choices), `num_steps`, `top_k`, `num_draft_tokens`; what is None
    comes from the head's config, else it is 4 steps, top 4, 16 nodes.

    Args:
        head: The draft layer; it is moved to the target's device and dtype when it is loaded for a model.
    """

    method = "eagle"

    def __init__(self, head: EagleHead | Eagle3Head) -> None:
        self.head = head.eval().requires_grad_(False)

    def __repr__(self) -> str:
        return f"EagleDrafter({type(self.head).__name__} of {self.head.name_or_path or 'this process'})"

    def check_target(self, model: PreTrainedModel) -> None:
        """Compare sizes, then move the head next to the target's lm_head.

        Raises:
            DrafterMismatchError: Another hidden size or vocabulary, too few layers, or no lm_head.
        """
        fit_head(self.head, model)
        self.feature_layers = self.head.feature_layers
        self.head.share_embedding(model)
        FeatureTap(model, self.feature_layers)

    def shape(self, config: SpeculativeConfig) -> EagleTreeShape:
        """The tree that this config and the head's own defaults ask for.

        Raises:
            InvalidConfigError: A size that contradicts the choices, or more children than there are draft tokens.
        """
        defaults = self.head.config
        tree = config.tree or defaults.tree
        if tree == "static":
            tree = DEFAULT_CHOICES if isinstance(defaults.tree, str) else defaults.tree
        if tree == "dynamic":
            num_steps = config.num_steps or defaults.num_steps or DEFAULT_NUM_STEPS
            top_k = config.top_k or defaults.top_k or DEFAULT_TOP_K
            wanted = config.num_draft_tokens or defaults.num_draft_tokens or DEFAULT_NUM_NODES
            candidates = top_k + (num_steps - 1) * top_k**2
            shape = EagleTreeShape(num_steps, top_k, min(wanted, 1 + candidates), None)
        else:
            choices = tuple(validate_choices(tree))
            top_k = 1 + max(max(path) for path in choices)
            shape = EagleTreeShape(max(map(len, choices)), top_k, len(choices) + 1, choices)
            for name, wanted, actual in (
                ("num_draft_tokens", config.num_draft_tokens, shape.num_nodes),
                ("num_steps", config.num_steps, shape.num_steps),
            ):
                if wanted not in (None, actual):
                    raise InvalidConfigError(
                        f"The static tree has {name} {actual}, got {name}={wanted}.", f"Leave {name} None."
                    )
        vocabulary = defaults.draft_vocab_size or defaults.vocab_size
        if shape.top_k > vocabulary:
            raise InvalidConfigError(f"`top_k` {shape.top_k} exceeds the draft vocabulary of {vocabulary} tokens.")
        return shape

    def num_nodes(self, config: SpeculativeConfig) -> int:
        """Nodes of every tree."""
        return self.shape(config).num_nodes

    def start(self, model: PreTrainedModel, prompt: Prompt, config: SpeculativeConfig) -> DraftSession:
        """A session that has yet to read the prompt; its first `propose` does.

        Raises:
            UnsupportedGenerationError: A prompt of embeddings without ids.
        """
        if prompt.input_ids.shape[1] == 0:
            raise UnsupportedGenerationError(
                "An EAGLE head needs the prompt's token ids, got only inputs_embeds.", "Pass input_ids as well."
            )
        return _EagleSession(self.head, model, prompt, self.shape(config))


@dataclass(frozen=True, slots=True)
class _Level:
    """Drafted nodes of one depth that may be expanded, as the draft layer left them."""

    features: Tensor  # [B, K, D] the head's own features at the nodes
    log_probs: Tensor  # [B, K, W] of the W best children
    tokens: Tensor  # [B, K, W] target ids of the children


class _EagleSession(DraftSession):
    def __init__(
        self, head: EagleHead | Eagle3Head, model: PreTrainedModel, prompt: Prompt, shape: EagleTreeShape
    ) -> None:
        if prompt.features is None:
            raise ValueError("an EAGLE session needs the prompt's features")
        self._head, self._shape = head, shape
        self._embedding = head.embedding_for(model)
        self._window = head.config.sliding_window
        self._lm_head: nn.Module | None = lm_head_rows(model, head.hot_token_ids) if head.shares_lm_head else None
        self._hot_token_ids = head.hot_token_ids
        self._cache = TreeCache([None], capacity=0, reserve=RESERVED_SLOTS)
        self._static = None if shape.choices is None else StaticLevels.of(shape.choices, prompt.roots.device)
        # entries to add next: features [B, T, layers * D], the tokens after them [B, T], how many are real in a row
        # a continued cache has no features of what it holds, and virtual tokens have no ids
        width = min(prompt.features.shape[1], prompt.input_ids.shape[1])
        self._features = prompt.features[:, -width:]
        self._tokens = torch.cat([prompt.input_ids[:, 1:], prompt.roots[:, None]], dim=-1)[:, -width:]
        self._padding = None if prompt.padding is None else prompt.padding.last(width)
        self._counts = [width] * len(prompt.roots)
        self._roots = prompt.roots

    def propose(self) -> TokenTree:
        if self._shape.num_nodes == 1:
            return TokenTree(self._roots[:, None], torch.full((1,), ROOT_PARENT, device=self._roots.device))
        root = self._read_committed()
        tree = self._grow_dynamic(root) if self._static is None else self._grow_static(root, self._static)
        self._cache.rollback()
        return tree

    def observe(self, acceptance: Acceptance, verification: Verification) -> None:
        if verification.features is None:
            raise ValueError("an EAGLE session needs the features of every verification")
        path = acceptance.path.clamp(min=0)
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        self._features = verification.features[rows, path]
        self._tokens = acceptance.tokens.clamp(min=0)
        self._counts = acceptance.counts
        self._roots = acceptance.next_token

    # ------------------------------------------------------------------------------------------- the draft layer

    def _read_committed(self) -> _Level:
        """Append the newly committed entries from true features; the root's children come from the last of them."""
        width, device = self._tokens.shape[1], self._tokens.device
        entries = torch.arange(width, device=device)
        lengths = self._cache.lengths
        positions = self._first_positions(lengths or [0] * len(self._counts)) + entries
        behind = entries[:, None] - entries
        visible = None
        if lengths or (self._window is not None and width > self._window):
            visible = (behind >= 0)[None]
        if not lengths and self._padding is not None:  # the prompt itself: its padding is no key
            visible = (behind >= 0) & self._padding.valid[:, None] | (behind == 0)
            positions = (self._padding.valid.cumsum(-1) - 1).clamp(min=0)
        if visible is not None and self._window is not None:
            visible = visible & (behind < self._window)
        fused = self._head.fuse(self._features.to(self._head.device, self._head.dtype))
        features = self._run(self._tokens, fused, positions, visible)
        self._cache.commit([range(count) for count in self._counts])
        last = torch.tensor([max(count - 1, 0) for count in self._counts], device=device)
        return self._level(features[torch.arange(len(last), device=device), last][:, None])

    def _run(self, tokens: Tensor, features: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        """The head over T new entries.

        Args:
            tokens, features, positions: `[B, T]`, `[B, T, D]`, `[B or 1, T]`.
            visible: `[B or 1, T, appended]` bool, what each sees of the entries appended since the last commit; all
                see what is committed. None is plain causal, for a prompt without padding.
        """
        batch_size, device = tokens.shape[0], self._head.device
        mask = None
        if visible is not None:
            mask = visible.expand(batch_size, -1, -1)
            if self._cache.lengths:
                committed = committed_slots(self._cache.lengths, self._padding, tokens.device)[:, None]
                committed = committed.expand(-1, tokens.shape[1], -1)
                if self._window is not None:  # it is longer than a tree is deep
                    slots = positions if self._padding is None else positions + self._padding.counts[:, None]
                    behind = slots[:, :, None] - torch.arange(committed.shape[2], device=slots.device)
                    committed = committed & (behind < self._window)
                mask = torch.cat([committed, mask], dim=-1)
            mask = mask[:, None].to(device)
        output: Tensor = self._head(
            self._embedding(tokens).to(device, self._head.dtype),
            features.to(device, self._head.dtype),
            positions.expand(batch_size, -1).to(device),
            attend_over(self._cache, mask),
        )
        return output.to(tokens.device)

    def _level(self, features: Tensor) -> _Level:
        """Score the children of K nodes by the target's own lm_head."""
        logits = self._head.score(features.to(self._head.device, self._head.dtype), self._lm_head).to(features.device)
        best, ids = logits.topk(self._shape.top_k, dim=-1)
        # at most 0 also after rounding: no child may score above its parent
        log_probs = (best.float() - logits.float().logsumexp(-1, keepdim=True)).clamp(max=0)
        tokens = ids if self._hot_token_ids is None else self._hot_token_ids.to(ids.device)[ids]
        return _Level(features, log_probs, tokens)

    def _expand(self, tokens: Tensor, parents: _Level, parent_index: Tensor, seen: Tensor, depth: int) -> _Level:
        """One level deeper: nodes `tokens [B, K]` below `parent_index [B, K]` of the level above.

        Args:
            tokens: The nodes' tokens.
            parents: The level they hang on.
            parent_index: Their parents in it.
            seen: `[B, K, appended]` bool, what each node sees of the entries appended while growing.
            depth: Of the nodes; children of the root have 1.
        """
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        positions = self._first_positions(self._cache.lengths) + (depth - 1)
        features = parents.features[rows, parent_index]
        return self._level(self._run(tokens, features, positions.expand(-1, tokens.shape[1]), seen))

    def _first_positions(self, lengths: Sequence[int]) -> Tensor:
        """`[B, 1]` position of the first entry after the committed ones."""
        firsts = torch.tensor(lengths, device=self._tokens.device)[:, None]
        return firsts if self._padding is None else firsts - self._padding.counts[:, None]

    # ------------------------------------------------------------------------------------------- growing trees

    def _grow_dynamic(self, root: _Level) -> TokenTree:
        """EAGLE-2: expand the top k nodes of each level by cumulative log-probability, then keep the N-1 best of all.

        A child's score never exceeds its parent's, and the stable sort prefers the earlier of equals, so parents
        are always kept with their children.
        """
        k, batch_size = self._shape.top_k, root.tokens.shape[0]
        rows = torch.arange(batch_size, device=root.tokens.device)[:, None]
        scores, tokens = [root.log_probs[:, 0]], [root.tokens[:, 0]]  # candidates [B, k] of level 1
        parents = [torch.full_like(root.tokens[:, 0], ROOT_PARENT)]
        frontier = torch.arange(k, device=rows.device).expand(batch_size, -1)  # candidates to expand
        level, parent_index = root, torch.zeros_like(frontier)
        frontier_tokens, frontier_scores = tokens[0], scores[0]
        seen = torch.zeros(batch_size, k, 0, dtype=torch.bool, device=rows.device)
        eye = torch.eye(k, dtype=torch.bool, device=rows.device).expand(batch_size, -1, -1)
        for depth in range(1, self._shape.num_steps):
            seen = torch.cat([seen, eye], dim=-1)
            level = self._expand(frontier_tokens, level, parent_index, seen, depth)
            children = level.log_probs + frontier_scores[:, :, None]  # [B, k, k]
            first = sum(candidates.shape[1] for candidates in scores)
            scores.append(children.flatten(1))
            tokens.append(level.tokens.flatten(1))
            parents.append(frontier.repeat_interleave(k, dim=1))
            frontier_scores, best = scores[-1].topk(k, dim=-1)
            frontier, parent_index = first + best, best // k
            frontier_tokens = tokens[-1][rows, best]
            seen = seen[rows, parent_index]
        return self._rerank(torch.cat(scores, -1), torch.cat(tokens, -1), torch.cat(parents, -1))

    def _rerank(self, scores: Tensor, tokens: Tensor, parents: Tensor) -> TokenTree:
        """The best `num_nodes - 1` of M candidates `[B, M]`, in their order of growth, with parents renumbered."""
        rows = torch.arange(scores.shape[0], device=scores.device)[:, None]
        kept = scores.sort(dim=-1, descending=True, stable=True).indices[:, : self._shape.num_nodes - 1]
        kept = kept.sort(dim=-1).values
        # place[c + 1] is the node of candidate c; candidate -1 is the root, node 0
        place = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.long, device=scores.device)
        place[rows, kept + 1] = torch.arange(1, kept.shape[1] + 1, device=scores.device)
        return TokenTree(
            tokens=torch.cat([self._roots[:, None], tokens[rows, kept]], dim=-1),
            parents=torch.cat([torch.full_like(rows, ROOT_PARENT), place[rows, parents[rows, kept] + 1]], dim=-1),
        )

    def _grow_static(self, root: _Level, static: StaticLevels) -> TokenTree:
        """EAGLE-1: the nodes are given as ranks; expand those that have children."""
        batch_size = root.tokens.shape[0]
        tokens, level = [self._roots[:, None]], root
        seen = torch.zeros(batch_size, 1, 0, dtype=torch.bool, device=root.tokens.device)
        for depth, step in enumerate(static.steps, start=1):
            tokens.append(level.tokens[:, step.parents, step.ranks])
            if len(step.expanded):
                count = len(step.expanded)
                own = torch.eye(count, dtype=torch.bool, device=seen.device).expand(batch_size, -1, -1)
                parent_index = step.parents[step.expanded]
                seen = torch.cat([seen[:, parent_index], own], dim=-1)
                level = self._expand(
                    tokens[-1][:, step.expanded], level, parent_index.expand(batch_size, -1), seen, depth
                )
        return TokenTree(torch.cat(tokens, dim=-1), static.node_parents)


@dataclass(frozen=True, slots=True)
class _StaticStep:
    """One level of a static tree."""

    parents: Tensor  # [K] which expanded node of the level above each node hangs on
    ranks: Tensor  # [K] which of its children
    expanded: Tensor  # [E] nodes of this level that have children


@dataclass(frozen=True, slots=True)
class StaticLevels:
    """A choice list as index tensors, level by level."""

    node_parents: Tensor  # [N] of the whole tree
    steps: tuple[_StaticStep, ...]

    @classmethod
    def of(cls, choices: Sequence[Choice], device: torch.device) -> StaticLevels:
        """From choices sorted by depth."""
        steps = []
        expanded: list[Choice] = [()]
        for depth in range(1, max(map(len, choices)) + 1):
            level = [path for path in choices if len(path) == depth]
            inner = [path for path in level if any(longer[:-1] == path for longer in choices)]
            steps.append(
                _StaticStep(
                    torch.tensor([expanded.index(path[:-1]) for path in level], device=device),
                    torch.tensor([path[-1] for path in level], device=device),
                    torch.tensor([level.index(path) for path in inner], dtype=torch.long, device=device),
                )
            )
            expanded = inner
        return cls(torch.tensor(choice_parents(choices), device=device), tuple(steps))
