"""The target model seen from the decoding loop: prefill a prompt, verify a tree, commit the kept path.

A target owns the cache of one generation. There are two kinds: a `TreeTarget` verifies trees over a static cache, a
`ChainTarget` chains over transformers' own. Both reach the model only through its public forward: masks, position ids,
a cache, forward hooks. Nothing here is per architecture; which kind a model is, `verification/probe.py` finds out.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.trees.draft import Draft
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.chain_cache import ChainCache
from hf_specdec.verification.features import Features, FeatureTap
from hf_specdec.verification.masks import Positions, PromptPadding
from hf_specdec.verification.model import CACHE_ARGUMENTS, execution_device, text_config


@dataclass(frozen=True, slots=True)
class Verification:
    """What one target forward finds at the nodes of a tree (N nodes), or at a prompt's last position (N = 1)."""

    logits: Tensor  # [B, N, V], the model's own dtype; a prompt: of all P positions where they were asked for
    features: Features | None  # of the N nodes, of all P positions of a prompt; None where nothing is tapped
    hidden_states: tuple[Tensor, ...] | None = None  # per layer [B, N or P, D]; None unless asked for
    attentions: tuple[Tensor | None, ...] | None = None  # per layer [B, H, N or P, slots]; None unless asked for


REPEATED_INPUTS = ("token_type_ids", "moe_mm_token_type_ids")
"""Model inputs as long as the text, of which every new token takes the last entry, as in plain generate."""
TEXT_INPUTS = ("mm_token_type_ids",)
"""Model inputs as long as the text that are zero for every new token."""


class Target(ABC):
    """One generation's view of the model: its cache, its prompt's padding and positions, and the two forwards.

    Args:
        model: The target.
        outputs: `output_hidden_states`, `output_attentions` where asked for.
    """

    supports_trees: bool
    """Whether a node may have more than one child."""
    lockstep: bool
    """Whether all rows must keep the same number of tokens in every step."""
    needs_replay = False
    """Whether a partly kept chain costs a second forward."""
    is_draft_view = False
    """Whether its model is another than the target, which appends to the cache to draft, see `with_model`."""
    is_adopted = False
    """Whether it continues a cache that was handed in, and has to bring it up to date."""
    cache: TreeCache | ChainCache

    def __init__(self, model: PreTrainedModel, outputs: Mapping[str, bool] = MappingProxyType({})) -> None:
        self.model, self._outputs = model, outputs
        self.padding: PromptPadding | None = None
        self.positions = Positions.of(None, 0, execution_device(model))
        self._tap: FeatureTap | None = None
        self._inputs: dict[str, Any] = {}  # further inputs of every verify forward; tensors of one column

    @property
    def start(self) -> int:
        """The slot of the next root: committed tokens of the longest row."""
        return self.cache.start

    @property
    @abstractmethod
    def capacity(self) -> int | None:
        """Slots per row that are allocated; None where the cache grows with every token."""

    @property
    def num_rows(self) -> int:
        """Rows of the cache that it continues; 0 where it begins with an empty one."""
        return len(self.cache.lengths)

    @abstractmethod
    def adopt(self, cache: Cache) -> None:
        """Continue a cache of transformers' that was handed in; it is written to in `hand_back` only.

        Raises:
            UnsupportedGenerationError: It cannot be continued.
        """

    @abstractmethod
    def admit(self, draft: Draft) -> Draft:
        """The part of a draft that this target can verify."""

    @abstractmethod
    def commit(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Keep one path per row of the tree that was verified."""

    @abstractmethod
    def rollback(self, num_nodes: int) -> None:
        """Forget the tree of so many nodes that was verified."""

    @abstractmethod
    def equalize_row_lengths(self, new_tokens: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Bring the cache of ragged rows to one length: shorter rows go on with padding, as in plain generate.

        Args:
            new_tokens: Emitted tokens of each row; all but the longest row's last are to be in the cache.
            pad_token_id: What follows a shorter row's last token.
        """

    @abstractmethod
    def _run(self, tree: TokenTree, known: int = 0) -> Any:
        """One forward over all nodes but the known ones."""

    def with_model(self, model: PreTrainedModel) -> Target:
        """The same generation seen with another model that fits its cache, to draft with: a part of the target."""
        other = copy.copy(self)
        other.model, other._outputs, other.is_draft_view = model, {}, True
        return other

    def close(self) -> None:  # noqa: B027  (most keep nothing)
        """The generation has ended, in whatever way: memory that outlives it is free for the next one."""

    def extend(self, tree: TokenTree, known: int) -> Tensor:
        """Logits `[B, N - known, V]` of a tree that grows level by level; appends its new nodes.

        Args:
            tree: All of it so far; every node with parent -1 follows the committed text, so it may be several.
            known: How many of its first nodes were appended since the last commit.
        """
        logits: Tensor = self._run(tree, known).logits
        return logits

    def forget(self) -> None:
        """Undo what `extend` has appended; a target that drafts must, before anything is verified."""
        self.cache.rollback()

    def hand_back(self) -> Cache:
        """The committed tokens as transformers' own cache, with which plain `generate()` can go on."""
        return self.cache.hand_back(text_config(self.model))

    @contextmanager
    def tapped(self, layers: Sequence[int]) -> Iterator[None]:
        """Keep the features of these layers in every forward of the block."""
        if not layers:
            yield
            return
        with FeatureTap(self.model, layers) as tap:
            self._tap = tap
            try:
                yield
            finally:
                self._tap = None

    def prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *,
        prompt_logits: bool = False,
    ) -> Verification:
        """Run the prompt by transformers' own prefill (chunking, embeddings, images) and commit it in every row.

        Args:
            input_ids: `[B, P]`.
            generation_config: Of this call.
            model_kwargs: What `generate()` prepared; holds our cache.
            prompt_logits: Ask for the logits of all positions; a prompt in chunks has those of its last chunk only.

        Returns:
            Logits `[B, 1, V]` of the last position, or `[B, P, V]`, and the features of all P where tapped.
        """
        self.padding = PromptPadding.of(model_kwargs.get("attention_mask"))
        if generation_config.prefill_chunk_size is None and "logits_to_keep" in model_kwargs:
            if prompt_logits:
                model_kwargs["logits_to_keep"] = 0  # transformers' word for all of them
            elif self._tap is not None:
                # an int lets some models (gemma4) skip prompt positions in upper layers; a tensor keeps them all
                model_kwargs["logits_to_keep"] = torch.tensor([-1], dtype=torch.long, device=input_ids.device)
        known = self.cache.start
        if self._tap is not None:
            self._tap.clear()
        outputs = self.model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)
        given = model_kwargs.get("inputs_embeds")
        self.cache.commit_all(outputs.logits.shape[0], (input_ids if given is None else given).shape[1])
        positions = model_kwargs.get("position_ids")
        if positions is not None and positions.shape[-1] < self.cache.start - known:
            positions = None  # virtual tokens in front (prompt tuning), which are counted by slots
        self.positions = Positions.of(positions, self.cache.start, input_ids.device)
        if self.padding is not None:
            self.padding = self.padding.behind(self.cache.start)
        self._inputs = _every_step(model_kwargs)
        logits = outputs.logits if prompt_logits else outputs.logits[:, -1:]
        return Verification(logits, self._features(), *self._layers(outputs))

    def verify(self, tree: TokenTree) -> Verification:
        """One forward over the whole tree; its keys are appended to the cache, not committed."""
        if self._tap is not None:
            self._tap.clear()
        outputs = self._run(tree)
        return Verification(outputs.logits, self._features(), *self._layers(outputs))

    def _every_step(self, tokens: Tensor) -> dict[str, Any]:
        """What every forward gets besides."""
        columns = {
            name: value.expand(tokens.shape) if isinstance(value, Tensor) else value
            for name, value in self._inputs.items()
        }
        return {**columns, **self._outputs}

    def _features(self) -> Features | None:
        return None if self._tap is None else self._tap.take()

    def _layers(self, outputs: Any) -> tuple[Any, Any]:
        return (
            outputs.hidden_states if self._outputs.get("output_hidden_states") else None,
            outputs.attentions if self._outputs.get("output_attentions") else None,
        )


def _every_step(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs that plain generate gives to every forward: one column of those that grow, settings as they are."""
    inputs: dict[str, Any] = {}
    for name, value in model_kwargs.items():
        if value is None or name in PREPARED_INPUTS:
            continue
        if name in REPEATED_INPUTS:
            inputs[name] = value[:, -1:]
        elif name in TEXT_INPUTS:
            inputs[name] = torch.zeros_like(value[:, -1:])
        elif isinstance(value, bool | int | float | str):
            inputs[name] = value
    return inputs


PREPARED_INPUTS = frozenset({
    "attention_mask", "position_ids", *CACHE_ARGUMENTS, "use_cache", "logits_to_keep",
    "inputs_embeds", "input_ids", "output_attentions", "output_hidden_states", "tokenizer", "return_dict",
})  # fmt: skip
"""What `generate()` prepares for the prompt, and a verify forward gets in its own way."""
