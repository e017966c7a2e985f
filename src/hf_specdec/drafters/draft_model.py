"""Draft-model drafting: a small language model, the assistant, drafts a tree or a sampled chain.

Sources: Leviathan et al. (https://arxiv.org/abs/2211.17192) and Chen et al. (https://arxiv.org/abs/2302.01318) for
chains, EAGLE-2 (https://arxiv.org/abs/2406.16858) for trees. Emitted tokens are committed to the assistant's cache at
the next draft (see `drafters/assistant.py`); drafted nodes are appended level by level, then rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.assistant import AssistantReader, num_embeddings, num_known_tokens
from hf_specdec.drafters.assistant_text import AssistantText
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession, Needs
from hf_specdec.drafters.draft_vocabulary import DraftVocabulary, target_sizes
from hf_specdec.drafters.token_translation import TokenTranslation, translation_between
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, UnsupportedGenerationError
from hf_specdec.trees.draft import PLAIN_STEP, Budget, Draft
from hf_specdec.trees.growth import Level, grow_dynamic, growable
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.validation import check_type
from hf_specdec.verification.fingerprint import Fingerprint
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.probe import TargetFacts, inspect_target
from hf_specdec.verification.step import Step
from hf_specdec.verification.target import Target
from hf_specdec.verification.trials import drops_cache

RESERVED_SLOTS = 512
"""Free slots kept after the text in the assistant's cache."""
DEFAULT_NUM_STEPS = 5
"""Default depth; each level is one forward of the assistant. 5 is common for a tenth of the target's size."""
DEFAULT_TOP_K = 1
"""Default children per node: a chain, which adds one token per row to each forward of the assistant. A tree takes as
many forwards, with more tokens in each and in the target's: it pays only if these cost little, as on an accelerator at
small batch sizes."""
DEFAULT_NUM_NODES = 16
"""Default nodes of a tree (`top_k` greater than 1), root included."""
MAX_PADDING_ROWS = 1024
"""Rows by which an assistant's embedding may be smaller than the target's vocabulary if no tokenizers are given.
Models with the same tokenizer differ in rows that no token uses, because vocabularies are padded to multiples of up to
1,024 (Qwen2.5: 151,936 and 152,064 rows)."""
MIN_SHARE = 0.01
"""Fraction of the target's tokens that an assistant with another tokenizer must share. The most frequent 1% are 45%
(of 49,152 tokens) to 60% (of 262,144) of the tokens in English questions: with fewer, most drafts end at once."""


class DraftModelDrafter(Drafter):
    """Drafts with a small causal language model, which may have another tokenizer than the target.

    Config fields: `num_steps` (default 5, or `num_draft_tokens - 1` for a chain), `top_k` (default 1, a chain),
    `num_draft_tokens` (default: `num_steps + 1` for a chain, 16 for a tree), `tree` (None or `"dynamic"`). An
    assistant that cannot verify trees (recurrent state) drafts chains for any `top_k`, and processes a batch row by
    row if its rows may keep different numbers of tokens. No draft exceeds its `max_position_embeddings`.

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

    Attributes:
        default_num_steps: `num_steps` if the config leaves it and `num_draft_tokens` None.
    """

    method = "draft_model"
    needs = Needs(token_ids=True)
    default_num_steps: int = DEFAULT_NUM_STEPS

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
        """Leave out the facts, because a copy's assistant is another model object."""
        return {**self.__dict__, "_facts": None}

    @property
    def facts(self) -> TargetFacts:
        """How the assistant can be run; determined on first use and again if the assistant has changed.

        Raises:
            UnsupportedModelError: The assistant can verify neither trees nor chains.
        """
        facts = self._facts
        if facts is None or facts.fingerprint != Fingerprint.of(self.assistant):
            facts = self._facts = inspect_target(self.assistant)
        return facts

    def bind(self, model: PreTrainedModel) -> None:
        """Check that the assistant knows the target's tokens or enough of them, and can verify trees or chains.

        Raises:
            DrafterMismatchError: The assistant is the target itself, has a smaller vocabulary, or its tokenizer shares
                too few tokens with the target's.
            UnsupportedModelError: The assistant can verify neither trees nor chains.
        """
        if self.assistant is model:
            raise DrafterMismatchError(
                f"The assistant is the target itself, the same {type(model).__name__} object.",
                "Pass a smaller model with the same tokenizer.",
            )
        _ = self.facts
        if self.tokenizer is None:
            self._check_size(model)
            return
        translation = self.translation(model)
        if translation is not None and translation.share < MIN_SHARE:
            raise DrafterMismatchError(
                f"The tokenizers share {len(translation.shared)} tokens, {translation.share:.1%} of the tokens of "
                f"{type(model).__name__}, and an assistant drafts only shared ones (at least {MIN_SHARE:.0%} needed).",
                'Use another assistant, or a method without one, such as speculative="prompt_lookup".',
            )

    def _check_size(self, model: PreTrainedModel) -> None:
        size, wanted = num_embeddings(self.assistant), int(text_config(model).vocab_size)
        if size < wanted - MAX_PADDING_ROWS:
            raise DrafterMismatchError(
                f"{type(self.assistant).__name__} embeds {size} tokens, {type(model).__name__} has {wanted}. More "
                f"than {MAX_PADDING_ROWS} are missing: the assistant of {self.method!r} has another tokenizer.",
                "Also pass tokenizer= and assistant_tokenizer=, or an assistant of the same model family.",
            )

    def translation(self, model: PreTrainedModel) -> TokenTranslation | None:
        """Return the translation from a target's tokens to the assistant's; None if it knows them by the same ids."""
        if self.tokenizer is None:
            return None
        sizes = target_sizes(model)[0], num_known_tokens(self.assistant)
        return translation_between(self.tokenizer, self.assistant_tokenizer, *sizes)

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of the largest tree or chain.

        Raises:
            InvalidConfigError: `tree` is static, `sample=True` has `tree` or `top_k` > 1, or `top_k` is too large.
            UnsupportedGenerationError: Gradient checkpointing in train mode disables the assistant's cache.
        """
        if drops_cache(self.assistant):
            raise UnsupportedGenerationError(
                "Gradient checkpointing in train mode disables the assistant's key-value cache, which drafting needs.",
                "Call eval() or gradient_checkpointing_disable() on the assistant before generating.",
            )
        if config.tree not in (None, "dynamic"):
            raise InvalidConfigError(
                f"{self.method!r} grows its trees by the assistant's probabilities, got tree={config.tree!r}.",
                'Use tree="dynamic" or leave it None, and set num_steps, top_k or num_draft_tokens.',
            )
        top_k, num_nodes = config.top_k or DEFAULT_TOP_K, config.num_draft_tokens
        if self.sample and (top_k > 1 or config.tree is not None):
            raise InvalidConfigError(
                f"A drafter with sample=True draws a chain, got tree={config.tree!r} and top_k={config.top_k}.",
                "Leave both None, or create the drafter with sample=False.",
            )
        vocabulary = num_embeddings(self.assistant)
        if top_k > vocabulary:
            raise InvalidConfigError(f"`top_k` {top_k} exceeds the assistant's vocabulary of {vocabulary} tokens.")
        if top_k == 1:
            num_steps = config.num_steps or (num_nodes - 1 if num_nodes else self.default_num_steps)
            return self.trimmed(Budget(num_nodes or num_steps + 1, num_steps, 1))
        tree = Budget(num_nodes or DEFAULT_NUM_NODES, config.num_steps or self.default_num_steps, top_k)
        return self.trimmed(tree if self.facts.supports_trees else tree.chain)

    def trimmed(self, budget: Budget) -> Budget:
        """Return the budget without steps and nodes that no draft within it can have; `PLAIN_STEP` if nothing fits."""
        num_steps = min(budget.num_steps, budget.num_nodes - 1)
        return self._growable(replace(budget, num_steps=num_steps)) if num_steps > 0 else PLAIN_STEP

    def _growable(self, budget: Budget) -> Budget:
        return growable(budget)

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session; its first `propose` reads the prompt.

        Raises:
            UnsupportedModelError: The assistant has changed and can no longer verify trees or chains.
        """
        return self._session(target, context, self.limits(config))

    def _session(self, target: Target, context: DraftContext, limits: Budget) -> DraftSession:
        return DraftModelSession(self, target, context, limits)


class DraftModelSession(DraftSession):
    """State of one generation: the assistant's caches, and the last emitted tokens.

    Args:
        drafter: The drafter.
        target: The target of the generation.
        context: Its prompt and first tokens.
        limits: Size of the largest draft.
    """

    def __init__(self, drafter: DraftModelDrafter, target: Target, context: DraftContext, limits: Budget) -> None:
        facts, assistant, batch_size = drafter.facts, drafter.assistant, len(context.roots)
        translation, device = drafter.translation(target.model), execution_device(assistant)
        self._drafter, self._roots = drafter, context.roots
        # the cache of an assistant that verifies only chains requires rows of equal length
        together = facts.supports_trees or (target.lockstep and translation is None)
        self._rows = [slice(0, batch_size)] if together else [slice(row, row + 1) for row in range(batch_size)]
        self._text = AssistantText(translation)
        prompts = [self._text.prompt(context, rows) for rows in self._rows]
        self._readers = [
            AssistantReader(facts.new_target(assistant, 0, RESERVED_SLOTS), ids, mask) for ids, mask in prompts
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
        """Draft for the rows of a reader, on the assistant's device.

        Args:
            reader: Reads and drafts.
            roots: `[R]` last emitted tokens.
            budget: Size of the draft, not plain.
        """
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
        """Queue emitted tokens `[B, P]`, padded with -1, for the readers.

        Args:
            tokens: The tokens.
            emitted: The same on the host, without padding; None if they have not been read.
        """
        longest = 0
        for reader, rows in zip(self._readers, self._rows, strict=True):
            ids, counts = self._text.emitted(tokens[rows], None if emitted is None else emitted[rows])
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
        """Return the `Level` of K nodes: their `top_k` likeliest children that may be drafted.

        Args:
            logits: `[R, K, V]` of the assistant after the nodes.
            top_k: Children per node.
        """
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
            index = torch.multinomial(probs, num_samples=1)
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
