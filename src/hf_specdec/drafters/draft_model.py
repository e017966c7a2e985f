"""Draft-model drafting: a small language model, the assistant, drafts a tree or a sampled chain.

Sources: Leviathan et al. (https://arxiv.org/abs/2211.17192) and Chen et al. (https://arxiv.org/abs/2302.01318) for
chains, EAGLE-2 (https://arxiv.org/abs/2406.16858) for trees. The assistant runs as a second `Target`, so its masks,
windows, padding, ragged rows and recurrent states are handled by `verification/`. Emitted tokens are committed to its
cache at the next draft; drafted nodes are appended level by level, then rolled back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import SIZES, DraftContext, Drafter, DraftSession, DraftTarget, Needs
from hf_specdec.drafters.registry import register
from hf_specdec.drafters.token_translation import TokenTranslation, translation_between
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, UnsupportedGenerationError
from hf_specdec.randomness import draw
from hf_specdec.transformers_private import supports_logits_to_keep
from hf_specdec.trees.draft import PLAIN_STEP, Budget, Draft
from hf_specdec.trees.growth import Level, grow_dynamic, growable
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.validation import check_type
from hf_specdec.verification.fingerprint import Fingerprint
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.probe import TargetFacts, inspect_target
from hf_specdec.verification.runners import Runner
from hf_specdec.verification.step import Step
from hf_specdec.verification.target import Target
from hf_specdec.verification.trials import drops_cache, first_inputs

READER_SLOTS = 512
"""Free slots kept after the text in the assistant's cache."""
MAX_PADDING_ROWS = 1024
"""Rows by which an assistant's embedding may be smaller than the target's vocabulary if no tokenizers are given.
Models with the same tokenizer differ in rows that no token uses, because vocabularies are padded to multiples of up to
1,024 (Qwen2.5: 151,936 and 152,064 rows)."""
MIN_SHARE = 0.01
"""Fraction of the target's tokens that an assistant with another tokenizer must share. The most frequent 1% are 45%
(of 49,152 tokens) to 60% (of 262,144) of the tokens in English questions: with fewer, most drafts end at once."""


@register(
    "draft_model",
    part="an assistant model",
    how_given="pass assistant_model=, or call model.add_drafter(DraftModelDrafter(assistant))",
)
class DraftModelDrafter(Drafter):
    """Drafts with a small causal language model, which may have another tokenizer than the target.

    Config fields: `num_steps` (default 5, or `num_draft_tokens - 1` for a chain), `top_k` (default 1, a chain),
    `num_draft_tokens` (default: `num_steps + 1` for a chain, 16 for a tree), `tree` (None or `"dynamic"`). An
    assistant that cannot verify trees drafts chains for any `top_k`, and processes a batch row by row if its rows may
    keep different numbers of tokens. No draft exceeds its `max_position_embeddings`. It runs with the CPU kernels if
    its target does.

    With another tokenizer, only tokens that both have are drafted; all other tokens of the text are spelled in the
    assistant's tokens.

    With `sample=True` the output has the target's distribution, but a seed does not reproduce plain `generate()`'s
    tokens; otherwise the output does not depend on the assistant. The assistant is not modified and may be unattached.

    Args:
        assistant: Any decoder-only transformers model that can verify trees or chains, on any device.
        sample: Draw a chain from the assistant's softmax (of raw logits over the target's vocabulary) and return the
            distributions, for acceptance by `"rejection"` or `"block"`. False drafts the most likely tokens.
        tokenizer: The target's tokenizer, if the assistant has another one; None if it has the same.
        assistant_tokenizer: The assistant's tokenizer; given together with `tokenizer`, or not at all.

    Raises:
        InvalidConfigError: Only one of the tokenizers is given.
    """

    needs = Needs(token_ids=True)
    accepts = ("tree=dynamic", *SIZES)
    tree_from = "the assistant's probabilities"
    # Each level is one forward of the assistant; 5 is common for a tenth of the target's size. A chain adds one token
    # per row to each forward. A tree takes as many forwards, with more tokens in each and in the target's: it pays
    # only if these cost little, as on an accelerator at small batch sizes.
    defaults = Budget(num_nodes=16, num_steps=5, top_k=1)
    _growable = staticmethod(growable)

    def __init__(
        self, assistant: PreTrainedModel, *, sample: bool = False, tokenizer: Any = None,
        assistant_tokenizer: Any = None,
    ) -> None:  # fmt: skip
        check_type("assistant", assistant, nn.Module, "Load it: AutoModelForCausalLM.from_pretrained(...).")
        if (tokenizer is None) != (assistant_tokenizer is None):
            raise InvalidConfigError(
                f"Only `{'assistant_tokenizer' if tokenizer is None else 'tokenizer'}` is given.",
                "Pass both `tokenizer` and `assistant_tokenizer`, or neither if they are the same.",
            )
        self.assistant, self.sample, self.samples = assistant, sample, sample
        self.tokenizer, self.assistant_tokenizer = tokenizer, assistant_tokenizer
        self._facts: TargetFacts | None = None
        self.runner: Runner | None = None  # of the assistant's forward

    def with_program(self, make: Callable[[PreTrainedModel, Any], Any]) -> Self:
        """See `Drafter`."""
        other = copy.copy(self)
        other._facts, other.runner = self.facts, make(self.assistant, self.facts)
        return other

    def or_known(self, known: Drafter | None) -> Drafter:
        """Return `known` if it drafts in the same way with the same models and tokenizers, otherwise this drafter."""
        parts = ("assistant", "tokenizer", "assistant_tokenizer", "sample")
        same = type(known) is type(self) and all(getattr(known, part) is getattr(self, part) for part in parts)
        return known if known is not None and same else self

    def __repr__(self) -> str:
        name = getattr(self.assistant, "name_or_path", "") or "this process"
        sampling = ", sample=True" if self.sample else ""
        return f"{type(self).__name__}({type(self.assistant).__name__} of {name}{sampling})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to the assistant, because a copy's assistant is another model object."""
        return {**self.__dict__, "_facts": None, "runner": None}

    @property
    def facts(self) -> TargetFacts:
        """How the assistant can be run; determined on first use and again if the assistant has changed."""
        facts = self._facts
        if facts is None or facts.fingerprint != Fingerprint.of(self.assistant):
            facts = self._facts = inspect_target(self.assistant)
        return facts

    @property
    def drafts_trees(self) -> bool:
        """Whether the assistant can draft trees, not only chains."""
        return self.facts.supports_trees

    def bind(self, model: PreTrainedModel) -> None:
        """Check that the assistant knows the target's tokens or enough of them, and can verify trees or chains."""
        if self.assistant is model:
            raise DrafterMismatchError(
                f"The assistant is the target itself, the same {type(model).__name__} object.",
                "Pass a smaller model with the same tokenizer.",
            )
        _ = self.drafts_trees
        size, wanted = num_embeddings(self.assistant), int(text_config(model).vocab_size)
        if self.tokenizer is None and size < wanted - MAX_PADDING_ROWS:
            raise DrafterMismatchError(
                f"{type(self.assistant).__name__} embeds {size} tokens, {type(model).__name__} has {wanted}. More "
                f"than {MAX_PADDING_ROWS} are missing: the assistant of {self.method!r} has another tokenizer.",
                "Also pass tokenizer= and assistant_tokenizer=, or an assistant of the same model family.",
            )
        translation = self.translation(model)
        if translation is not None and translation.share < MIN_SHARE:
            raise DrafterMismatchError(
                f"The tokenizers share {len(translation.shared)} tokens, {translation.share:.1%} of the tokens of "
                f"{type(model).__name__}, and an assistant drafts only shared ones (at least {MIN_SHARE:.0%} needed).",
                'Use another assistant, or a method without one, such as speculative="prompt_lookup".',
            )

    def translation(self, model: PreTrainedModel) -> TokenTranslation | None:
        """Return the translation from a target's tokens to the assistant's; None if it knows them by the same ids."""
        if self.tokenizer is None:
            return None
        sizes = _target_sizes(model)[0], _num_known_tokens(self.assistant)
        return translation_between(self.tokenizer, self.assistant_tokenizer, *sizes)

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of the largest tree or chain."""
        if drops_cache(self.assistant):
            raise UnsupportedGenerationError(
                "Gradient checkpointing in train mode disables the assistant's key-value cache, which drafting needs.",
                "Call eval() or gradient_checkpointing_disable() on the assistant before generating.",
            )
        top_k, num_nodes = config.top_k or (1 if self.sample else self.defaults.top_k), config.num_draft_tokens
        if self.sample and (top_k > 1 or config.tree is not None):
            raise InvalidConfigError(
                f"A drafter with sample=True draws a chain, got tree={config.tree!r} and top_k={config.top_k}.",
                "Leave both None, or create the drafter with sample=False.",
            )
        vocabulary = num_embeddings(self.assistant)
        if top_k > vocabulary:
            raise InvalidConfigError(f"`top_k` {top_k} exceeds the assistant's vocabulary of {vocabulary} tokens.")
        if top_k == 1:
            num_steps = config.num_steps or (num_nodes - 1 if num_nodes else self.defaults.num_steps)
            return self.trimmed(Budget(num_nodes or num_steps + 1, num_steps, 1))
        tree = super().limits(config)
        return self.trimmed(tree if self.drafts_trees else tree.chain)

    def trimmed(self, budget: Budget) -> Budget:
        """Return the budget without steps and nodes that no draft within it can have; `PLAIN_STEP` if nothing fits."""
        num_steps = min(budget.num_steps, budget.num_nodes - 1)
        return self._growable(replace(budget, num_steps=num_steps)) if num_steps > 0 else PLAIN_STEP

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session; its first `propose` reads the prompt."""
        return DraftModelSession(self, target, context, self.limits(config))


class DraftModelSession(DraftSession):
    """State of one generation: the assistant's caches, and the last emitted tokens."""

    def __init__(self, drafter: DraftModelDrafter, target: DraftTarget, context: DraftContext, limits: Budget) -> None:
        facts, assistant, batch_size = drafter.facts, drafter.assistant, len(context.roots)
        translation, device = drafter.translation(target.model), execution_device(assistant)
        self._drafter, self._roots = drafter, context.roots
        # the cache of an assistant that verifies only chains requires rows of equal length
        together = facts.supports_trees or (target.lockstep and translation is None)
        self._rows = [slice(0, batch_size)] if together else [slice(row, row + 1) for row in range(batch_size)]
        self._translation = translation
        ids = context.input_ids
        mask = torch.ones_like(ids) if context.padding is None else context.padding.valid.to(ids)
        prompts = [(ids[rows], mask[rows]) for rows in self._rows]
        if translation is not None:
            prompts = [translation.prompts(*prompt) for prompt in prompts]
        self._readers = [
            AssistantReader(facts.new_target(assistant, 0, READER_SLOTS, runner=drafter.runner), *prompt)
            for prompt in prompts
        ]
        self._longest = max(ids.shape[1] for ids, _ in prompts)  # upper bound of the number of tokens in a row
        self._read(context.roots[:, None], None)
        self._max_length: int | None = getattr(text_config(assistant), "max_position_embeddings", None)
        self._vocabulary = DraftVocabulary.of(target.model, assistant, translation, device)
        self._limits = replace(limits, top_k=min(limits.top_k, self._vocabulary.size))

    def propose(self, budget: Budget) -> Draft:
        """See `DraftSession.propose`; a plain draft if a longer one would exceed the assistant's positions."""
        budget = self._drafter.trimmed(budget.within(self._limits))
        deepest = self._longest + budget.num_steps - 1
        if budget.is_plain or (self._max_length is not None and 0 < self._max_length < deepest):
            return Draft.plain(self._roots)
        pairs = zip(self._readers, self._rows, strict=True)
        drafts = [self._draft(reader, self._roots[rows].to(reader.device), budget) for reader, rows in pairs]
        return _joined(drafts, self._roots.device)

    def _draft(self, reader: AssistantReader, roots: Tensor, budget: Budget) -> Draft:
        """Draft for the rows of a reader, whose last emitted tokens are the roots `[R]`, on the assistant's device."""
        draw = self._draw_chain if self._drafter.sample else self._grow_tree
        draft = draw(reader, roots, reader.read()[:, 0], budget)
        reader.forget()
        return draft

    def observe(self, step: Step) -> None:
        """See `DraftSession.observe`."""
        acceptance = step.acceptance
        self._read(acceptance.tokens, acceptance.emitted)
        self._roots = acceptance.next_token

    def _read(self, tokens: Tensor, emitted: Sequence[Sequence[int]] | None) -> None:
        """Queue emitted tokens `[B, P]`, padded with -1, for the readers; `emitted` are the same if on the host."""
        longest = 0
        for reader, rows in zip(self._readers, self._rows, strict=True):
            ids, on_host = tokens[rows], None if emitted is None else emitted[rows]
            counts = [1] * len(ids) if on_host is None else [len(row) for row in on_host]
            if self._translation is not None:
                ids, counts = self._translation.emitted(ids, on_host)
            reader.add(ids, counts)
            longest = max(longest, *counts)
        self._longest += longest

    def _grow_tree(self, reader: AssistantReader, roots: Tensor, logits: Tensor, budget: Budget) -> Draft:
        """Grow a tree of the most likely tokens; `logits` `[R, V]` are the assistant's after the roots."""
        width = budget.top_k

        def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
            first = (depth - 2) * width  # index of the first node of the level above among the appended nodes
            parents = parent_index + first if depth > 1 else torch.full_like(parent_index, ROOT_PARENT)
            return self._score(reader.extend(self._vocabulary.assistant_tokens(tokens), parents, depth), width)

        return grow_dynamic(roots, self._score(logits[:, None], width), expand, budget)

    def _score(self, logits: Tensor, top_k: int) -> Level:
        """Return the likeliest children that may be drafted of K nodes, after which the logits are `[R, K, V]`."""
        # rounding could give values above 0, but no child may score above its parent
        log_probs = self._vocabulary.narrowed(logits).float().log_softmax(-1).clamp(max=0)
        values, index = log_probs.topk(top_k, dim=-1)
        return Level(logits, values, self._vocabulary.target_tokens(index))

    def _draw_chain(self, reader: AssistantReader, roots: Tensor, logits: Tensor, budget: Budget) -> Draft:
        """Draw a chain and keep each draw's distribution; `logits` `[R, V]` are the assistant's after the roots."""
        known = self._vocabulary
        tokens, drawn_from, log_probs = [roots[:, None]], [], [torch.zeros_like(roots[:, None], dtype=torch.float32)]
        for depth in range(1, budget.num_steps + 1):
            probs = known.narrowed(logits).float().softmax(-1)
            index = draw(probs)
            token = known.target_tokens(index)
            tokens.append(token)
            drawn_from.append(known.spread(probs))
            log_probs.append(probs.gather(1, index).log().clamp(max=0))
            if depth < budget.num_steps:
                logits = reader.extend(known.assistant_tokens(token), torch.full_like(token, depth - 2), depth)[:, 0]
        drawn_from.append(torch.zeros_like(drawn_from[0]))  # no draw after the last node
        chain = torch.cat(tokens, dim=-1)
        parents = torch.arange(ROOT_PARENT, budget.num_steps, device=chain.device).expand_as(chain)
        tree = TokenTree(chain, parents, torch.stack(drawn_from, dim=1), max_depth=budget.num_steps)
        return Draft(tree, torch.cat(log_probs, dim=-1))


def _joined(drafts: Sequence[Draft], device: torch.device) -> Draft:
    """Concatenate drafts of equal shape along the rows."""

    def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
        present = [part.to(device) for part in parts if part is not None]
        return torch.cat(present) if present else None

    tokens, parents = joined([draft.tree.tokens for draft in drafts]), joined([draft.tree.parents for draft in drafts])
    assert tokens is not None
    assert parents is not None
    draft_probs, max_depth = joined([draft.tree.draft_probs for draft in drafts]), drafts[0].tree.max_depth
    tree = TokenTree(tokens, parents, draft_probs, max_depth=max_depth)
    return Draft(tree, joined([draft.log_probs for draft in drafts]))


class AssistantReader:
    """Runs the assistant on some rows of a batch; its cache holds their text, followed by the nodes being drafted.

    The `mask` of the prompt `[R, P]` is 0 at padding, which is on the left.
    """

    def __init__(self, target: Target, prompt: Tensor, mask: Tensor) -> None:
        self._target, self.device = target, execution_device(target.model)
        self._largest_id = num_embeddings(target.model) - 1
        self._prompt: tuple[Tensor, Tensor] | None = (prompt.to(self.device), mask.to(self.device))
        self._pending = self._prompt[0][:, :0]
        self._counts = [0] * len(prompt)
        self._last: Tensor | None = None  # [R, V] after the text
        self._drafted: TokenTree | None = None

    def add(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Queue text for the next `read`: tokens `[R, P]`, padded with -1, and the number of tokens in each row."""
        self._pending = torch.cat([self._pending, tokens.to(self.device)], dim=-1)
        self._counts = [known + count for known, count in zip(self._counts, counts, strict=True)]

    def read(self, num_masks: int = 0, mask_token: int = 0) -> Tensor:
        """Commit queued text (first the prompt) in one forward, and predict the tokens after it.

        A row of the forward holds the queued tokens, then the masks (only for assistants that verify trees), then
        padding, all as one chain: under a causal mask, padding at the end has no effect. Only the queued tokens stay
        in the cache.

        Returns:
            Logits `[R, 1 + num_masks, V]` after the text, then after each mask; all are also valid in rows without new
            text.
        """
        if self._prompt is not None:
            ids, mask = self._prompt
            model, self._prompt = self._target.model, None
            inputs = first_inputs(model, mask, self._target.cache)
            if supports_logits_to_keep(model):
                inputs["logits_to_keep"] = 1
            prefilled = self._target.prefill(ids.clamp(max=self._largest_id), GenerationConfig(), inputs)
            self._last = prefilled.logits[:, -1].to(self.device)
        width = max(self._counts)
        if width + num_masks == 0:
            assert self._last is not None
            return self._last[:, None]
        # tokens first, in order: each `add` has padded its own columns
        tokens_first = (self._pending < 0).int().sort(dim=-1, stable=True).indices[:, :width]
        tokens = nn.functional.pad(self._pending.gather(1, tokens_first), (0, num_masks), value=-1)
        counts = (tokens >= 0).sum(-1, keepdim=True)
        nodes = torch.arange(width + num_masks, device=tokens.device)
        masks = (nodes >= counts) & (nodes < counts + num_masks)
        chain = TokenTree(torch.where(masks, mask_token, tokens), nodes + ROOT_PARENT)
        logits = self._verify(chain)
        path = torch.where(nodes < counts, nodes, -1)[:, :width]
        kept = tuple(tuple(range(count)) for count in self._counts)
        drafted = (chain.num_nodes - 1,) * len(kept)
        self._target.commit(chain, Accepted(path, chain.tokens, chain.tokens[:, -1], kept, kept, drafted))
        # index of the last queued token, then of each mask
        last_token_and_masks = (counts + torch.arange(-1, num_masks, device=counts.device)).clamp(min=0)
        logits = logits.gather(1, last_token_and_masks[..., None].expand(-1, -1, logits.shape[-1]))
        if self._last is not None and min(self._counts) == 0:
            # the text of a row without queued tokens has not changed, nor have the logits after it
            after = torch.where(counts > 0, logits[:, 0], self._last)
            logits = torch.cat([after[:, None], logits[:, 1:]], dim=1)
        self._pending, self._counts = self._pending[:, :0], [0] * len(self._counts)
        self._last = logits[:, 0]
        return logits

    def extend(self, tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
        """Append a level of K drafted nodes per row and return the logits `[R, K, V]` after them.

        Args:
            tokens: `[R, K]`.
            parents: `[R, K]` index of each parent among the appended nodes; -1: the node directly follows the text.
            depth: Depth of the nodes, 1 if they directly follow the text.
        """
        known = 0
        if self._drafted is not None:
            known = self._drafted.num_nodes
            tokens = torch.cat([self._drafted.tokens, tokens], dim=-1)
            parents = torch.cat([self._drafted.parents, parents], dim=-1)
        self._drafted = TokenTree(tokens, parents, max_depth=depth - 1)
        return self._verify(self._drafted, known)

    def forget(self) -> None:
        """Remove the drafted nodes from the cache."""
        if self._drafted is not None:
            self._target.rollback(self._drafted.num_nodes)
            self._drafted = None

    def _verify(self, tree: TokenTree, known: int = 0) -> Tensor:
        # ids that the assistant does not embed are placeholders or padding rows of the target's embedding
        ids = tree.tokens.clamp(0, self._largest_id)
        tree = TokenTree(ids, tree.parents, max_depth=tree.max_depth)
        return self._target.extend(tree, known).to(self.device)


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The S tokens that an assistant may draft for a target, and how they map to the ids of both models.

    With the target's tokenizer, these are the ids below S, which are the same in both models. With another one, they
    are the shared tokens of a translation.

    Attributes:
        size: S.
        width: V, the size of the target's logits.
    """

    size: int
    width: int
    translation: TokenTranslation | None
    _target_ids: Tensor | None = None  # [S]
    _assistant_ids: Tensor | None = None  # [S]
    _assistant_id_of: Tensor | None = None  # [V] assistant ids of the shared tokens, 0 elsewhere

    @classmethod
    def of(
        cls, target: PreTrainedModel, assistant: PreTrainedModel, translation: TokenTranslation | None,
        device: torch.device,
    ) -> DraftVocabulary:  # fmt: skip
        """Create the tables on the assistant's device; no translation: it has the target's tokenizer."""
        num_tokens, width = _target_sizes(target)
        if translation is None:
            return cls(min(num_tokens, _num_known_tokens(assistant)), width, None)
        target_ids, assistant_ids = translation.shared.to(device).unbind(-1)
        table = torch.zeros(width, dtype=torch.long, device=device).scatter(0, target_ids, assistant_ids)
        return cls(len(target_ids), width, translation, target_ids, assistant_ids, table)

    def narrowed(self, logits: Tensor) -> Tensor:
        """Select the logits `[..., S]` of this vocabulary's tokens from the assistant's logits `[..., Va]`."""
        if self._assistant_ids is None:
            return logits[..., : self.size]
        return logits.index_select(-1, self._assistant_ids)

    def target_tokens(self, index: Tensor) -> Tensor:
        """Return the target's ids of tokens given by their index in this vocabulary, in the same shape."""
        return index if self._target_ids is None else self._target_ids[index]

    def assistant_tokens(self, tokens: Tensor) -> Tensor:
        """Return the assistant's ids of drafted tokens, which are the target's ids, in the same shape."""
        return tokens if self._assistant_id_of is None else self._assistant_id_of[tokens]

    def without(self, logits: Tensor, assistant_token: int) -> Tensor:
        """Return logits `[..., S]` with -inf at one of the assistant's tokens."""
        ids = self._assistant_ids
        if ids is None:
            ids = torch.arange(self.size, device=logits.device)
        return torch.where(ids == assistant_token, -torch.inf, logits)

    def num_without(self, assistant_token: int) -> int:
        """Return the number of these tokens without one of the assistant's, which need not be one of them."""
        if self.translation is None:
            return self.size - (assistant_token < self.size)
        return self.size - int((self.translation.shared[:, 1] == assistant_token).sum())

    def spread(self, probs: Tensor) -> Tensor:
        """Return probabilities `[..., V]` over the target's ids, 0 at all other tokens, of those `[..., S]` here."""
        if self._target_ids is None:
            return nn.functional.pad(probs, (0, self.width - self.size))
        spread = probs.new_zeros(*probs.shape[:-1], self.width)
        return spread.index_copy(-1, self._target_ids, probs)


def num_embeddings(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model can embed; it may exceed the config's vocabulary size."""
    return int(getattr(model.get_input_embeddings(), "num_embeddings", 0) or text_config(model).vocab_size)


def _num_known_tokens(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model can both embed and predict."""
    size = num_embeddings(model)
    return min(size, int(getattr(model.get_output_embeddings(), "out_features", size)))


def _target_sizes(target: PreTrainedModel) -> tuple[int, int]:
    """Return the number of ids that a target can emit, and the size V of its logits, which may be larger."""
    vocab_size = int(text_config(target).vocab_size)
    width = int(getattr(target.get_output_embeddings(), "out_features", vocab_size))
    return min(vocab_size, width), width
