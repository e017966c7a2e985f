"""Draft-model drafting: a small model with the target's tokenizer, the assistant, drafts a tree or a sampled chain.

Sources: Leviathan et al. (https://arxiv.org/abs/2211.17192) and Chen et al. (https://arxiv.org/abs/2302.01318) for
chains, EAGLE-2 (https://arxiv.org/abs/2406.16858) for trees. The assistant runs as a second `Target`, so its masks,
windows, padding, ragged rows and recurrent states are handled by `verification/`. Emitted tokens are committed to its
cache at the next draft; drafted nodes are appended level by level, then rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, UnsupportedGenerationError
from hf_specdec.transformers_private import supports_logits_to_keep
from hf_specdec.trees.draft import PLAIN_STEP, Budget, Draft
from hf_specdec.trees.growth import Level, grow_dynamic, growable
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.fingerprint import Fingerprint
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.probe import TargetFacts, drops_cache, first_inputs, inspect_target
from hf_specdec.verification.step import Step
from hf_specdec.verification.target import Target

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


class DraftModelDrafter(Drafter):
    """Drafts with a small causal language model that has the target's tokenizer.

    Config fields: `num_steps` (default 5, or `num_draft_tokens - 1` for a chain), `top_k` (default 1, a chain),
    `num_draft_tokens` (default: `num_steps + 1` for a chain, 16 for a tree), `tree` (None or `"dynamic"`). An
    assistant that cannot verify trees (recurrent state) drafts chains for any `top_k`, and processes a batch row by
    row if its rows may keep different numbers of tokens. No draft exceeds its `max_position_embeddings`.

    With `sample=True` the output has the target's distribution, but a seed does not reproduce plain `generate()`'s
    tokens; otherwise the output does not depend on the assistant. The assistant is not modified and may be unattached.

    Args:
        assistant: Any decoder-only transformers model that can verify trees or chains, on any device.
        sample: Draw a chain from the assistant's softmax (of raw logits over the target's vocabulary) and return the
            distributions, for acceptance by `"rejection"` or `"block"`. False drafts the most likely tokens.
    """

    method = "draft_model"

    def __init__(self, assistant: PreTrainedModel, *, sample: bool = False) -> None:
        self.assistant, self.sample = assistant, sample
        self._facts: TargetFacts | None = None

    @classmethod
    def reuse(cls, known: Drafter | None, assistant: PreTrainedModel, *, sample: bool) -> DraftModelDrafter:
        """Return `known` if it drafts with this assistant in the same way, otherwise a new drafter."""
        if isinstance(known, cls) and known.assistant is assistant and known.sample == sample:
            return known
        return cls(assistant, sample=sample)

    def __repr__(self) -> str:
        name = getattr(self.assistant, "name_or_path", "") or "this process"
        return f"DraftModelDrafter({type(self.assistant).__name__} of {name}{', sample=True' if self.sample else ''})"

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
        """Check the assistant's vocabulary size, and that it can verify trees or chains.

        Raises:
            DrafterMismatchError: The assistant is the target itself, or has a smaller vocabulary.
            UnsupportedModelError: The assistant can verify neither trees nor chains.
        """
        if self.assistant is model:
            raise DrafterMismatchError(
                f"The assistant is the target itself, the same {type(model).__name__} object.",
                "Pass a smaller model with the same tokenizer.",
            )
        _ = self.facts
        size, wanted = _num_embeddings(self.assistant), int(text_config(model).vocab_size)
        if size < wanted:
            raise DrafterMismatchError(
                f"{type(self.assistant).__name__} embeds {size} tokens, {type(model).__name__} has {wanted}: the "
                "assistant of 'draft_model' must have the target's tokenizer.",
                "Pass an assistant of the same model family. For another tokenizer, use transformers' universal "
                "assisted decoding: model.generate(..., assistant_model=..., tokenizer=..., "
                "assistant_tokenizer=...) without `speculative`.",
            )

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of the largest tree or chain.

        Raises:
            InvalidConfigError: `tree` is static, `sample=True` has `tree` or `top_k` > 1, or `top_k` is too large.
        """
        if config.tree not in (None, "dynamic"):
            raise InvalidConfigError(
                f"'draft_model' grows its trees by the assistant's probabilities, got tree={config.tree!r}.",
                'Use tree="dynamic" or leave it None, and set num_steps, top_k or num_draft_tokens.',
            )
        top_k, num_nodes = config.top_k or DEFAULT_TOP_K, config.num_draft_tokens
        if self.sample and (top_k > 1 or config.tree is not None):
            raise InvalidConfigError(
                f"DraftModelDrafter(sample=True) draws a chain, got tree={config.tree!r} and top_k={config.top_k}.",
                "Leave both None, or create the drafter with sample=False.",
            )
        vocabulary = _num_embeddings(self.assistant)
        if top_k > vocabulary:
            raise InvalidConfigError(f"`top_k` {top_k} exceeds the assistant's vocabulary of {vocabulary} tokens.")
        if top_k == 1:
            num_steps = config.num_steps or (num_nodes - 1 if num_nodes else DEFAULT_NUM_STEPS)
            return _trimmed(Budget(num_nodes or num_steps + 1, num_steps, 1))
        tree = Budget(num_nodes or DEFAULT_NUM_NODES, config.num_steps or DEFAULT_NUM_STEPS, top_k)
        return _trimmed(tree if self.facts.supports_trees else tree.chain)

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session; its first `propose` reads the prompt.

        Raises:
            UnsupportedGenerationError: The prompt has no token ids, or gradient checkpointing disables the cache.
            UnsupportedModelError: The assistant has changed and can no longer verify trees or chains.
        """
        if context.input_ids.shape[1] == 0:
            raise UnsupportedGenerationError(
                "An assistant model needs the prompt's token ids, got only inputs_embeds.", "Pass input_ids as well."
            )
        if drops_cache(self.assistant):
            raise UnsupportedGenerationError(
                "Gradient checkpointing in train mode disables the assistant's key-value cache, which drafting needs.",
                "Call eval() or gradient_checkpointing_disable() on the assistant before generating.",
            )
        return _DraftModelSession(self, target, context, self.limits(config))


def _num_embeddings(model: PreTrainedModel) -> int:
    return int(getattr(model.get_input_embeddings(), "num_embeddings", 0) or text_config(model).vocab_size)


def _trimmed(budget: Budget) -> Budget:
    """Return the budget with at most one step per drafted node, and `growable` nodes; `PLAIN_STEP` if nothing fits."""
    num_steps = min(budget.num_steps, budget.num_nodes - 1)
    return growable(Budget(budget.num_nodes, num_steps, budget.top_k)) if num_steps > 0 else PLAIN_STEP


class _Reader:
    """Runs the assistant on some rows of a batch; its cache holds their text, followed by the nodes being drafted.

    Args:
        target: The assistant, with an empty cache.
        prompt: `[R, P]` ids.
        mask: `[R, P]` long, 0 at padding.
        roots: `[R]` first emitted tokens.
    """

    def __init__(self, target: Target, prompt: Tensor, mask: Tensor, roots: Tensor) -> None:
        self._target, self._device = target, execution_device(target.model)
        self._largest_id = _num_embeddings(target.model) - 1
        self._prompt: tuple[Tensor, Tensor] | None = (prompt.to(self._device), mask.to(self._device))
        self._pending = [roots.to(self._device)[:, None]]
        self._counts = [1] * len(roots)
        self._last: Tensor | None = None
        self._drafted: TokenTree | None = None

    def add(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Queue text for the next `read`: tokens `[R, P]`, padded with -1, and the number of tokens in each row."""
        self._pending.append(tokens.to(self._device))
        self._counts = [known + count for known, count in zip(self._counts, counts, strict=True)]

    def read(self) -> Tensor:
        """Commit queued text (first the prompt); return logits `[R, V]` after it, arbitrary in rows without any."""
        if self._prompt is not None:
            self._read_prompt(*self._prompt)
            self._prompt = None
        width = max(self._counts)
        if width:
            tokens = torch.cat(self._pending, dim=-1)
            order = (tokens < 0).int().sort(dim=-1, stable=True).indices[:, :width]
            tokens = tokens.gather(1, order)
            nodes = torch.arange(width, device=tokens.device)
            logits = self._verify(TokenTree(tokens, nodes + ROOT_PARENT))
            self._keep(tokens, torch.where(tokens >= 0, nodes, -1))
            last = ((tokens >= 0).sum(-1) - 1).clamp(min=0)
            self._last = logits.gather(1, last[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0]
        self._pending, self._counts = [], [0] * len(self._counts)
        assert self._last is not None
        return self._last

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
        # only ids beyond the target's config.vocab_size, which are placeholders, can exceed the assistant's embedding
        ids = tree.tokens.clamp(0, self._largest_id)
        tree = TokenTree(ids, tree.parents, max_depth=tree.max_depth)
        return self._target.extend(tree, known).to(self._device)

    def _read_prompt(self, ids: Tensor, mask: Tensor) -> None:
        model = self._target.model
        inputs = first_inputs(model, mask, self._target.cache)
        if supports_logits_to_keep(model):
            inputs["logits_to_keep"] = 1
        self._target.prefill(ids.clamp(max=self._largest_id), GenerationConfig(), inputs)

    def _keep(self, tokens: Tensor, path: Tensor) -> None:
        """Commit the valid tokens of the verified chain, whose indices are `path` `[R, P]`, padded with -1."""
        nodes = tuple(tuple(range(count)) for count in self._counts)
        kept = Acceptance(path, tokens, tokens[:, -1], nodes, nodes, (tokens.shape[1] - 1,) * len(tokens))
        self._target.commit(TokenTree(tokens, torch.arange(tokens.shape[1], device=path.device) + ROOT_PARENT), kept)


class _DraftModelSession(DraftSession):
    def __init__(self, drafter: DraftModelDrafter, target: Target, context: DraftContext, limits: Budget) -> None:
        facts, assistant, batch_size = drafter.facts, drafter.assistant, len(context.roots)
        self._sample, self._roots = drafter.sample, context.roots
        # the cache of an assistant that verifies only chains requires rows of equal length
        together = facts.supports_trees or target.lockstep
        self._rows = [slice(0, batch_size)] if together else [slice(row, row + 1) for row in range(batch_size)]
        ids, padding = context.input_ids, context.padding
        mask = torch.ones_like(ids) if padding is None else padding.valid.to(ids)
        self._readers = [
            _Reader(facts.new_target(assistant, 0, RESERVED_SLOTS), ids[rows], mask[rows], context.roots[rows])
            for rows in self._rows
        ]
        self._longest = ids.shape[1] + 1  # upper bound of the number of tokens in a row
        self._max_length: int | None = getattr(text_config(assistant), "max_position_embeddings", None)
        head, self._vocab_size = target.model.get_output_embeddings(), int(text_config(target.model).vocab_size)
        self._width = int(getattr(head, "out_features", self._vocab_size))  # V of the target's logits
        self._vocab_size = min(self._vocab_size, self._width)
        self._limits = replace(limits, top_k=min(limits.top_k, self._vocab_size))

    def propose(self, budget: Budget) -> Draft:
        budget = _trimmed(budget.within(self._limits))
        deepest = self._longest + budget.num_steps - 1
        if budget.is_plain or (self._max_length is not None and 0 < self._max_length < deepest):
            return Draft.plain(self._roots)
        draw = self._draw_chain if self._sample else self._grow_tree
        drafts = []
        for reader, rows in zip(self._readers, self._rows, strict=True):
            logits = reader.read()
            drafts.append(draw(reader, self._roots[rows].to(logits.device), logits, budget))
            reader.forget()
        return _joined(drafts, self._roots.device)

    def observe(self, step: Step) -> None:
        acceptance = step.acceptance
        for reader, rows in zip(self._readers, self._rows, strict=True):
            reader.add(acceptance.tokens[rows], acceptance.counts[rows])
        self._longest += max(acceptance.counts)
        self._roots = acceptance.next_token

    def _grow_tree(self, reader: _Reader, roots: Tensor, logits: Tensor, budget: Budget) -> Draft:
        """Grow a tree of the most likely tokens; `logits` `[R, V]` are the assistant's after the roots."""
        width = budget.top_k

        def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
            first = (depth - 2) * width  # index of the first node of the level above among the appended nodes
            parents = parent_index + first if depth > 1 else torch.full_like(parent_index, ROOT_PARENT)
            return self._score(reader.extend(tokens, parents, depth), width)

        return grow_dynamic(roots, self._score(logits[:, None], width), expand, budget)

    def _score(self, logits: Tensor, top_k: int) -> Level:
        """Return the `Level` of K nodes: their `top_k` likeliest children in the target's vocabulary.

        Args:
            logits: `[R, K, V]` of the assistant after the nodes.
            top_k: Children per node.
        """
        # rounding could give values above 0, but no child may score above its parent
        log_probs = logits[..., : self._vocab_size].float().log_softmax(-1).clamp(max=0)
        return Level(logits, *log_probs.topk(top_k, dim=-1))

    def _draw_chain(self, reader: _Reader, roots: Tensor, logits: Tensor, budget: Budget) -> Draft:
        """Draw a chain and keep each draw's distribution; `logits` `[R, V]` are the assistant's after the roots."""
        tokens, drawn_from, log_probs = [roots[:, None]], [], [torch.zeros_like(roots[:, None], dtype=torch.float32)]
        for depth in range(1, budget.num_steps + 1):
            probs = logits[:, : self._vocab_size].float().softmax(-1)
            token = torch.multinomial(probs, num_samples=1)
            tokens.append(token)
            drawn_from.append(nn.functional.pad(probs, (0, self._width - probs.shape[1])))
            log_probs.append(probs.gather(1, token).log().clamp(max=0))
            if depth < budget.num_steps:
                logits = reader.extend(token, torch.full_like(token, depth - 2), depth)[:, 0]
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
