"""The target model seen from the decoding loop: prefill a prompt, verify a tree.

Reaches the model only through its public forward: 4D masks, position ids, a cache, one forward hook. Nothing
here is per architecture; whether a model can do this at all, `probe.py` finds out. Before: `tree.py`, `masks.py`,
`cache.py`. After: `accept.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.target.cache import TreeCache
from hf_specdec.target.chain_cache import ChainCache
from hf_specdec.target.features import FeatureTap
from hf_specdec.target.masks import MaskLayout, Positions, PromptPadding, tree_masks
from hf_specdec.target.model import cache_argument, execution_device, text_config
from hf_specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Verification:
    """What one target forward says about a tree (N nodes) or about a prompt (its last position only: N = 1)."""

    logits: Tensor  # [B, N, V], the model's own dtype
    # [B, N, layers * D] the hidden states that the drafter reads; a prompt: of all P positions; None: it reads none
    features: Tensor | None
    hidden_states: tuple[Tensor, ...] | None = None  # per layer [B, N or P, D]; None unless asked for
    attentions: tuple[Tensor | None, ...] | None = None  # per layer [B, H, N or P, slots]; None unless asked for


# ----------------------------------------------------------------------------------------------- prefill and verify

REPEATED_INPUTS = ("token_type_ids", "moe_mm_token_type_ids")
"""Model inputs as long as the text, of which every new token takes the last entry, as in plain generate."""
TEXT_INPUTS = ("mm_token_type_ids",)
"""Model inputs as long as the text that are zero for every new token."""


class Target:
    """One generation's view of the model: its cache, its prompt's padding and positions, and the two forwards.

    Args:
        model: The target.
        cache: This generation's cache; what it already holds is continued.
        padding: Where the prompt is padding.
        tap: Keeps features where the drafter asks for them.
        outputs: `output_hidden_states`, `output_attentions` where asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache | ChainCache,
        padding: PromptPadding | None,
        tap: FeatureTap | None = None,
        outputs: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        self.model, self.cache, self.padding, self.tap, self._outputs = model, cache, padding, tap, outputs
        # a chain has transformers' own masks, of whatever kinds
        self._mask_layout = MaskLayout.of(text_config(model)) if isinstance(cache, TreeCache) else None
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.positions = Positions.of(None, 0, execution_device(model))
        self._inputs: dict[str, Any] = {}  # further inputs of every verify forward; tensors of one column

    def prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> Verification:
        """Run the prompt by transformers' own prefill (chunking, embeddings, images) and commit it in every row.

        Args:
            input_ids: `[B, P]`.
            generation_config: Of this call.
            model_kwargs: What `generate()` prepared; holds our cache.

        Returns:
            Logits `[B, 1, V]` of the last position, and the features of all P where tapped.
        """
        if self.tap is not None and generation_config.prefill_chunk_size is None and "logits_to_keep" in model_kwargs:
            # an int lets some models (gemma4) skip prompt positions in upper layers; a tensor keeps them all
            model_kwargs["logits_to_keep"] = torch.tensor([-1], device=input_ids.device)
        known = self.cache.start
        if self.tap is not None:
            self.tap.clear()
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
        return Verification(outputs.logits[:, -1:], self._features(), *self._layers(outputs))

    def verify(self, tree: TokenTree) -> Verification:
        """One forward over the whole tree; its keys are appended to the cache, not committed."""
        if self.tap is not None:
            self.tap.clear()
        if isinstance(self.cache, ChainCache):
            self.cache.mark()
            outputs = self._run_chain(tree.tokens, self.cache)
        else:
            outputs = self._run_tree(tree, self.cache)
        return Verification(outputs.logits, self._features(), *self._layers(outputs))

    def commit(self, tree: TokenTree, paths: Sequence[Sequence[int]]) -> None:
        """Keep one path per row of the tree that was verified."""
        if isinstance(self.cache, TreeCache):
            self.cache.commit(paths)
            return
        lengths = self.cache.lengths
        again = self.cache.keep(paths, tree.num_nodes)
        if again:
            grown, self.cache.lengths = self.cache.lengths, lengths
            self._run_chain(tree.tokens[:, :again], self.cache)
            self.cache.lengths = grown

    def _run_tree(self, tree: TokenTree, cache: TreeCache) -> Any:
        mask_layout = self._mask_layout
        assert mask_layout is not None
        ancestors = tree.ancestor_mask()
        lengths = cache.lengths or [0] * tree.tokens.shape[0]
        return self.model(
            input_ids=tree.tokens,
            attention_mask=tree_masks(mask_layout, ancestors, lengths, self.padding, self.model.dtype),
            position_ids=self.positions.of_nodes(ancestors.sum(-1) - 1, lengths),
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **self._every_step(tree.tokens),
        )

    def _run_chain(self, tokens: Tensor, cache: ChainCache) -> Any:
        """Several steps of plain decoding at once: its own masks and positions."""
        batch_size, num_nodes = tokens.shape
        mask = None
        if self.padding is not None:
            more = cache.start + num_nodes - self.padding.valid.shape[1]
            mask = nn.functional.pad(self.padding.valid, (0, more), value=True).long()
        inputs = self._every_step(tokens)
        if self._takes_positions:
            depths = torch.arange(num_nodes, device=tokens.device)[None]
            inputs["position_ids"] = self.positions.of_nodes(depths, cache.lengths or [0] * batch_size)
        inputs[cache_argument(self.model)] = cache
        prepared = self.model.prepare_inputs_for_generation(tokens, attention_mask=mask, use_cache=True, **inputs)
        prepared.pop("logits_to_keep", None)  # some models put it to one; here every node's logits are needed
        return self.model(**prepared, return_dict=True)

    def _every_step(self, tokens: Tensor) -> dict[str, Any]:
        """What every forward gets besides."""
        columns = {
            name: value.expand(tokens.shape) if isinstance(value, Tensor) else value
            for name, value in self._inputs.items()
        }
        return {**columns, **self._outputs}

    def _features(self) -> Tensor | None:
        return None if self.tap is None else self.tap.take()

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
    "attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache", "logits_to_keep",
    "inputs_embeds", "input_ids", "output_attentions", "output_hidden_states", "tokenizer", "return_dict",
})  # fmt: skip
"""What `generate()` prepares for the prompt, and a verify forward gets in its own way."""
