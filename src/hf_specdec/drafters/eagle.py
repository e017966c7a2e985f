"""EAGLE drafting: grow a tree of tokens level by level with a draft layer, and keep its likeliest nodes.

Sources: EAGLE (https://arxiv.org/abs/2401.15077) for static trees, EAGLE-2 (https://arxiv.org/abs/2406.16858) for
the dynamic tree. Entry t of the draft cache pairs the target's feature of x[t] with the embedding of x[t+1]. Entries
from true features are committed; entries made while a tree grows are forgotten with it. Whatever is a `DraftLayer`
drafts so: EAGLE heads, MTP modules (`drafters/mtp.py`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.config import Choice, SpeculativeConfig, validate_choices
from hf_specdec.draft import Budget, Draft
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession, Needs, bind_head
from hf_specdec.drafters.draft_layer import DraftLayer, Entries
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, UnsupportedGenerationError
from hf_specdec.heads.base import EagleFamilyHead
from hf_specdec.heads.captured import GraphDraftLayer, Growing
from hf_specdec.heads.compiled import CompiledDraftLayer
from hf_specdec.step import Step
from hf_specdec.target.cache import TreeCache
from hf_specdec.target.masks import committed_slots
from hf_specdec.target.model import lm_head_rows
from hf_specdec.target.recorders import RECORDERS
from hf_specdec.target.runners import Form
from hf_specdec.target.target import Target
from hf_specdec.tree_growth import (
    Level,
    Plan,
    StaticLevels,
    choices_within,
    grow,
    growable,
    limits_of,
    scored,
)

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
    """The largest tree of one generation: a static one (choices), or a dynamic one."""

    limits: Budget
    choices: tuple[Choice, ...] | None


class LayerDrafter(Drafter):
    """Drafts with a draft layer.

    Attributes:
        head: The layer.
        program: What reads and scores in its place.
        default_num_steps, default_top_k: The tree's depth and width where neither config nor layer say it.
    """

    head: DraftLayer
    program: DraftLayer | None = None  # the same layer, compiled or captured
    default_num_steps = DEFAULT_NUM_STEPS
    default_top_k = DEFAULT_TOP_K

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
            num_steps = config.num_steps or defaults.num_steps or self.default_num_steps
            top_k = config.top_k or defaults.top_k or self.default_top_k
            wanted = config.num_draft_tokens or defaults.num_draft_tokens or DEFAULT_NUM_NODES
            shape = EagleTreeShape(growable(Budget(wanted, num_steps, top_k)), None)
        else:
            choices = tuple(validate_choices(tree))
            shape = EagleTreeShape(limits_of(choices), choices)
            for name, wanted, actual in (
                ("num_draft_tokens", config.num_draft_tokens, shape.limits.num_nodes),
                ("num_steps", config.num_steps, shape.limits.num_steps),
            ):
                if wanted not in (None, actual):
                    raise InvalidConfigError(
                        f"The static tree has {name} {actual}, got {name}={wanted}.", f"Leave {name} None."
                    )
        vocabulary = defaults.draft_vocab_size or defaults.vocab_size
        if shape.limits.top_k > vocabulary:
            raise InvalidConfigError(
                f"`top_k` {shape.limits.top_k} exceeds the draft vocabulary of {vocabulary} tokens."
            )
        return shape

    def limits(self, config: SpeculativeConfig) -> Budget:
        """The tree of `shape`."""
        return self.shape(config).limits

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """A session that has yet to read the prompt; its first `propose` does.

        Raises:
            UnsupportedGenerationError: A prompt of embeddings without ids.
        """
        if context.input_ids.shape[1] == 0:
            raise UnsupportedGenerationError(
                f"The method {self.method!r} needs the prompt's token ids, got only inputs_embeds.",
                "Pass input_ids as well.",
            )
        return self._session(target.model, context, self.shape(config))

    def _session(self, model: PreTrainedModel, context: DraftContext, shape: EagleTreeShape) -> DraftSession:
        return EagleSession(self.program or self.head, model, context, shape)


class EagleDrafter(LayerDrafter):
    """Drafts with an EAGLE head: version 1/2, which shares the target's embedding and lm_head, or 3.

    Config fields: `tree` (`"dynamic"`, `"static"` or choices), `num_steps`, `top_k`, `num_draft_tokens`; what is None
    comes from the head's config, else it is 4 steps, top 4, 16 nodes.

    Args:
        head: The draft layer; it is moved to the target's device and dtype when it is loaded for a model.
    """

    method = "eagle"
    head: EagleFamilyHead

    def __init__(self, head: EagleFamilyHead) -> None:
        self.head = head.eval().requires_grad_(False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.head).__name__} of {self.head.name_or_path or 'this process'})"

    def compiled(self, model: PreTrainedModel, form: Form) -> EagleDrafter:
        """See `Drafter`."""
        lm_head = lm_head_rows(model, self.head.hot_token_ids) if self.head.shares_lm_head else None
        other, device = copy.copy(self), self.head.device
        layer = CompiledDraftLayer.of(self.head, lm_head) if form == "compile" else self.head
        other.program = layer
        if device.type in RECORDERS:
            other.program = GraphDraftLayer(layer, lm_head, RECORDERS[device.type](device))
        return other

    def bind(self, model: PreTrainedModel) -> None:
        """Compare sizes, then move the head next to the target's lm_head.

        Raises:
            DrafterMismatchError: Another hidden size or vocabulary, too few layers, or no lm_head.
        """
        bind_head(self.head, model)
        self.needs = Needs(feature_layers=self.head.feature_layers)
        self.head.share_embedding(model)
        size = self.head.config.hidden_size
        width = getattr(self.head.embedding_for(model), "embedding_dim", size)
        if width != size:
            raise DrafterMismatchError(
                f"{type(model).__name__} embeds tokens in {width} numbers, this head takes {size}.",
                "A head with an embedding of its own fits such a model.",
            )


class EagleSession(DraftSession):
    """One generation's drafting with one layer: its cache holds the text, and a tree while it grows."""

    def __init__(self, head: DraftLayer, model: PreTrainedModel, context: DraftContext, shape: EagleTreeShape) -> None:
        if context.features is None:
            raise ValueError("an EAGLE session needs the prompt's features")
        self._head, self._shape = head, shape
        self._embedding = head.embedding_for(model)
        self._window = head.config.sliding_window
        self._lm_head: nn.Module | None = lm_head_rows(model, head.hot_token_ids) if head.shares_lm_head else None
        self._hot_token_ids = head.hot_token_ids
        new_cache = head.new_cache if isinstance(head, GraphDraftLayer) else functools.partial(TreeCache, [None], 0)
        self._cache = new_cache(RESERVED_SLOTS)
        self._static: dict[Budget, StaticLevels] = {}
        # a continued cache has no features of what it holds, and virtual tokens have no ids
        features = context.features.of(head.feature_layers)
        width, batch_size = min(features.shape[1], context.input_ids.shape[1]), len(context.roots)
        self._prompt: Entries | None = Entries(
            features[:, -width:],
            torch.cat([context.input_ids[:, 1:], context.roots[:, None]], dim=-1)[:, -width:],
            torch.arange(width, device=context.roots.device).expand(batch_size, -1),
            [range(width)] * batch_size,
        )
        self._pending: list[Entries] = []
        self._padding = None if context.padding is None else context.padding.last(width)
        self._roots = context.roots

    def propose(self, budget: Budget) -> Draft:
        """See `DraftSession`."""
        if budget.is_plain:
            return Draft.plain(self._roots)
        budget = budget.within(self._shape.limits)
        plan: Plan = growable(budget)
        if self._shape.choices is not None:
            plan = self._levels(self._shape.choices, budget)
        return self._grow(self._read_committed(), plan)

    def _grow(self, last: Tensor, plan: Plan) -> Draft:
        """Grow a tree behind the committed entries, the last of which has the features `[B, 1, D]`."""
        if isinstance(self._head, GraphDraftLayer):
            lengths = self._cache.lengths_on(self._roots.device, len(last))
            committed = committed_slots(lengths, self._cache.start, self._padding)
            growing = Growing(self._roots, last, self._first_positions(len(last)), lengths, committed)
            draft = self._head.grow(growing, plan, self._cache, self._embedding)
            if draft is not None:
                return draft

        def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
            return self._expand(tokens, above, parent_index, seen, depth, plan.top_k)

        draft = grow(self._roots, self._score(last, plan.top_k), expand, plan)
        self._cache.rollback()
        return draft

    def _levels(self, choices: Sequence[Choice], budget: Budget) -> StaticLevels:
        """The part of the static tree that fits a budget."""
        if budget not in self._static:
            self._static[budget] = StaticLevels.of(choices_within(choices, budget), self._roots.device)
        return self._static[budget]

    def observe(self, step: Step) -> None:
        """See `DraftSession`."""
        features, acceptance = step.verification.features, step.acceptance
        if features is None:
            raise ValueError("an EAGLE session needs the features of every verification")
        states = features.of(self._head.feature_layers)
        path = acceptance.path.clamp(min=0)
        index = path.to(states.device)[:, :, None].expand(-1, -1, states.shape[-1])
        places = torch.arange(path.shape[1], device=path.device)
        self._pending.append(
            Entries(
                states.gather(1, index),
                acceptance.tokens.clamp(min=0),
                torch.where(acceptance.path >= 0, places, -1),
                [range(count) for count in acceptance.counts],
            )
        )
        self._roots = acceptance.next_token

    def close(self) -> None:
        """See `DraftSession`."""
        if isinstance(self._head, GraphDraftLayer):
            self._head.release(self._cache)

    # ------------------------------------------------------------------------------------------- the draft layer

    def _read_committed(self) -> Tensor:
        """Append the entries of what was committed, from true features; the last one's features `[B, 1, D]`."""
        last = None
        if self._prompt is not None:
            last, self._prompt = self._read_prompt(self._prompt), None
        if self._pending:
            last, self._pending = self._read_steps(Entries.joined(self._pending)), []
        assert last is not None
        return last

    def _read_prompt(self, prompt: Entries) -> Tensor:
        """The layer's features `[B, 1, D]` of the prompt's last entry; all of it is appended."""
        width, device = prompt.tokens.shape[1], prompt.tokens.device
        entries = torch.arange(width, device=device)
        positions, visible = entries[None], None
        behind = entries[:, None] - entries
        if self._padding is not None:  # padding is not attended to
            visible = (behind >= 0) & self._padding.valid[:, None] | (behind == 0)
            positions = (self._padding.valid.cumsum(-1) - 1).clamp(min=0)
        elif self._window is not None and width > self._window:
            visible = (behind >= 0)[None]
        if visible is not None and self._window is not None:
            visible = visible & (behind < self._window)
        features = self._run(prompt.tokens, self._fuse(prompt.features), positions, visible)
        self._cache.commit(prompt.path, prompt.nodes)
        return features[:, -1:]

    def _read_steps(self, entries: Entries) -> Tensor:
        """The layer's features `[B, 1, D]` of each row's last entry; a row that got none keeps any."""
        counts = (entries.path >= 0).sum(-1, keepdim=True)
        places = torch.arange(entries.tokens.shape[1], device=entries.path.device)
        real = (entries.path[:, :, None] == places).any(1)  # [B, T]
        positions = self._first_positions(len(counts)) + (real.cumsum(-1) - 1).clamp(min=0)
        behind = places[:, None] - places
        visible = (behind >= 0) & real[:, None] | (behind == 0)
        if self._window is not None:
            visible = visible & (positions[:, :, None] - positions[:, None] < self._window)
        features = self._run(entries.tokens, self._fuse(entries.features), positions, visible)
        self._cache.commit(entries.path, entries.nodes)
        last = entries.path.gather(1, (counts - 1).clamp(min=0)).clamp(min=0)
        return features.gather(1, last[:, :, None].expand(-1, -1, features.shape[-1]))

    def _fuse(self, features: Tensor) -> Tensor:
        return self._head.fuse(features.to(self._head.device, self._head.dtype))

    def _run(self, tokens: Tensor, features: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        """The head over T new entries.

        Args:
            tokens, features, positions: `[B, T]`, `[B, T, D]`, `[B or 1, T]`.
            visible: `[B or 1, T, appended]` bool, what each sees of the entries appended since the last commit; all
                see what is committed. None is plain causal, for a prompt without padding.
        """
        device = self._head.device
        output = self._head.read(
            self._embedding(tokens).to(device, self._head.dtype),
            features.to(device, self._head.dtype),
            positions.expand(len(tokens), -1).to(device),
            self._cache,
            self._mask(positions, visible, len(tokens)),
        )
        return output.to(tokens.device)

    def _mask(self, positions: Tensor, visible: Tensor | None, batch_size: int) -> Tensor | None:
        """`[B, 1, T, S]` bool on the head's device: what is committed, and what is visible of the rest, see `_run`."""
        if visible is None:
            return None
        start, mask = self._cache.start, visible.expand(batch_size, -1, -1)
        if start:
            lengths = self._cache.lengths_on(visible.device, batch_size)
            committed = committed_slots(lengths, start, self._padding)[:, None].expand(-1, visible.shape[1], -1)
            if self._window is not None:  # it is longer than a tree is deep
                slots = positions if self._padding is None else positions + self._padding.counts[:, None]
                behind = slots[:, :, None] - torch.arange(start, device=slots.device)
                committed = committed & (behind < self._window)
            mask = torch.cat([committed, mask], dim=-1)
        return mask[:, None].to(self._head.device)

    def _score(self, features: Tensor, top_k: int) -> Level:
        """Score the children of K nodes by the target's own lm_head."""
        logits = self._head.score(features.to(self._head.device, self._head.dtype), self._lm_head).to(features.device)
        return scored(features, logits, top_k, self._hot_token_ids)

    def _expand(
        self, tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int, top_k: int
    ) -> Level:
        """One level deeper, see `tree_growth.Expand`."""
        positions = (self._first_positions(len(tokens)) + (depth - 1)).expand(-1, tokens.shape[1])
        index = parent_index[:, :, None].expand(-1, -1, above.features.shape[-1])
        return self._score(self._run(tokens, above.features.gather(1, index), positions, seen), top_k)

    def _first_positions(self, batch_size: int) -> Tensor:
        """`[B, 1]` position of the first entry after the committed ones."""
        firsts = self._cache.lengths_on(self._roots.device, batch_size)[:, None]
        return firsts if self._padding is None else firsts - self._padding.counts[:, None]
