"""The target model's interface to the decoding loop: prefill a prompt, verify a tree, commit the accepted path.

A target owns the cache of one generation. `TreeTarget` verifies trees with a static cache, `ChainTarget` verifies
chains with transformers' own. Both use only the model's public forward (masks, position ids, a cache) and forward
hooks; there is no code per architecture. `probe.inspect_target` determines which of the two a model supports.
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.transformers_private import experts_name, prefill, set_experts_name
from hf_specdec.trees.draft import Draft
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.features import ChosenStates, Features, FeatureTap, PromptPadding, Window
from hf_specdec.verification.graph_backends import groups_on_device
from hf_specdec.verification.masks import UNBOUNDED, LengthBounds, Positions
from hf_specdec.verification.model import CACHE_ARGUMENTS, execution_device, text_config
from hf_specdec.verification.programs import faster_products
from hf_specdec.verification.step import Verified

REPEATED_INPUTS = ("token_type_ids", "moe_mm_token_type_ids")
"""Model inputs with one entry per token, whose last entry is repeated for new tokens, as in plain `generate()`."""
TEXT_INPUTS = ("mm_token_type_ids",)
"""Model inputs with one entry per token that are zero for new tokens."""

MAX_GATHERED_EXPERTS = 16
"""Rows x nodes x experts per token up to which a forward on a GPU gathers the weights of its experts.

That is transformers' choice for all decoding (`batched_mm`): it copies the weights of every selected expert, so they
are moved three times. `grouped_mm` reads those of each expert once, with about ten small kernels more per layer. At 32
nodes of Qwen3-30B-A3B the copies are 2.4 GB per layer; a plain step still gathers. By calculation, not measured."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""Names of the number of selected experts in transformers' configs."""


@contextmanager
def expert_products(model: PreTrainedModel, num_tokens: int) -> Iterator[None]:
    """Choose how a forward over this many tokens multiplies by the weights of its experts, if it has any.

    On a CPU the model's own implementation stays, as in transformers. Where grouped products read the sizes of their
    groups on the host, they cannot be captured: then weights are gathered for any number of tokens.
    """
    config = text_config(model)
    if experts_name(config) != "grouped_mm" or execution_device(model).type == "cpu":
        yield
        return
    selected = next(
        (getattr(config, name) for name in EXPERTS_PER_TOKEN if hasattr(config, name)), MAX_GATHERED_EXPERTS
    )
    count = num_tokens * (max(selected) if isinstance(selected, Sequence) else selected)
    gathers = count <= MAX_GATHERED_EXPERTS or not groups_on_device(next(model.parameters()))
    set_experts_name(config, "batched_mm" if gathers else "grouped_mm")
    try:
        yield
    finally:
        set_experts_name(config, "grouped_mm")


class Target(ABC):
    """The target model in one generation: cache, padding and positions of the prompt, prefill and verify forwards.

    Args:
        model: The target model.
        outputs: Values of `output_hidden_states` and `output_attentions`, if requested.
    """

    supports_trees: bool
    """Whether a node may have more than one child."""
    lockstep: bool
    """Whether all rows must accept the same number of tokens in every step."""
    needs_replay = False
    """Whether a partly accepted chain needs a second forward."""
    is_draft_view = False
    """Whether the model is a part of the target that drafts with the target's cache, see `with_model`."""
    is_exact = False
    """Whether the call is exact, see `SpeculativeConfig.exact`."""
    width = 0
    """Nodes that every forward is padded to in an exact call with graphs, which verifies chains; 0 in other calls."""
    is_adopted = False
    """Whether it continues a cache passed by the user, which must be updated at the end."""
    cache: Cache
    """A `TreeCache` or a `ChainCache`."""

    def __init__(self, model: PreTrainedModel, outputs: Mapping[str, bool] = MappingProxyType({})) -> None:
        self.model, self._outputs = model, outputs
        self.padding: PromptPadding | None = None
        self.positions = Positions.of(None, 0, execution_device(model))
        self.bounds = LengthBounds.of(text_config(model))
        self._offsets: list[list[int]] | None = None
        self._highest: int | None = None  # largest position of a root, see `reach`
        self._whole: Target | None = None  # of a draft view, the target that it is a part of
        self._tap: FeatureTap | None = None
        self._inputs: dict[str, Any] = {}  # additional inputs of every verify forward; tensors have one column
        self._prompt_kwargs: dict[str, Any] = {}
        self._prompt_length = 0
        self.text: Callable[[], Tensor] | None = None  # returns prompt and answer `[B, L]`, if rows are equally long

    @property
    def start(self) -> int:
        """Slot of the next root: committed tokens of the longest row; an upper bound while a step is unread."""
        return self.cache.start

    def reach(self, rows: Sequence[int]) -> int:
        """Return the depth of the deepest draft after these rows that crosses none of the model's `bounds`.

        Reads the device once in a call, and only if a bound is ahead.
        """
        if not self.bounds.ends:
            return UNBOUNDED
        if self._offsets is None:  # of positions from slots; several sections if the prompt has images
            last = (self.positions.last + 1 - self.positions.num_slots).reshape(-1, self.positions.last.shape[-1])
            self._offsets = last.T.tolist()
        lengths, positions = self._row_lengths(), set[int]()
        for row in rows:
            positions.update(lengths[row] + offset for offset in self._offsets[row % len(self._offsets)])
        self._highest = max(positions, default=0)
        return self.bounds.reach({*positions, *(lengths[row] for row in rows)})

    def _row_lengths(self) -> Mapping[int, int]:
        """Return the committed slots of the rows of the batch that the cache holds."""
        return dict(enumerate(self.cache.lengths))

    @property
    def num_rows(self) -> int:
        """Number of rows in the cache; 0 before the first commit."""
        return len(self.cache.lengths)

    @property
    def active_share(self) -> float:
        """Rows that forwards compute, as a fraction of the batch, see `keep_rows`."""
        return 1.0

    @abstractmethod
    def adopt(self, cache: Cache) -> None:
        """Continue a cache passed by the user, which is not modified until `hand_back`; refuse what cannot be."""

    def admit(self, draft: Draft) -> Draft:
        """Return the part of a draft that this target can verify: a chain of first children if not the whole tree.

        The chain has no log-probabilities and sources.
        """
        if draft.tree.num_nodes == 1 or (self.supports_trees and not self.width):
            return draft
        return replace(draft, tree=draft.tree.first_children(), log_probs=None, sources=None)

    @abstractmethod
    def commit(self, tree: TokenTree, acceptance: Accepted) -> None:
        """Keep one path per row of the verified tree."""

    @abstractmethod
    def rollback(self, num_nodes: int) -> None:
        """Discard the verified tree, which has `num_nodes` nodes."""

    @abstractmethod
    def equalize_row_lengths(self, new_tokens: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Pad rows, after their emitted tokens, to the longest one without its last token, as `generate()` does."""

    @abstractmethod
    def _run(self, tree: TokenTree, known: int = 0) -> Any:
        """Run the model over all nodes except the first `known`; return outputs with `logits` `[B, N - known, V]`."""

    def keep_rows(self, active: Sequence[int]) -> None:  # noqa: B027  (optional to override)
        """Leave rows that have ended out of further forwards, if this saves time; by default, it does not.

        Drafts, logits and features keep one entry per row of the batch; those of rows left out are zeros. The `active`
        rows are ascending, and none of them was left out before.
        """

    def with_model(self, model: PreTrainedModel) -> Target:
        """Return a copy of this target that shares its cache and drafts with `model`, a part of the target model."""
        other = copy.copy(self)
        other.model, other._outputs, other.is_draft_view, other._whole = model, {}, True, self
        return other

    def close(self) -> None:  # noqa: B027  (optional to override)
        """End the generation, also after an error: make memory kept between calls available to the next one."""

    def extend(self, tree: TokenTree, known: int) -> Tensor:
        """Append all but the first `known` nodes of a growing tree and return their logits `[B, N - known, V]`.

        The tree may have several roots (parent -1), which follow the committed tokens.
        """
        with expert_products(self.model, tree.tokens[:, known:].numel()):
            return self._run(tree, known).logits

    def forget(self) -> None:
        """Discard the nodes appended by `extend`; required before the next verification."""
        self.cache.rollback()

    def hand_back(self) -> Cache:
        """Return the committed tokens as a transformers cache for plain `generate()`; rows must be equally long."""
        return self.cache.hand_back(text_config(self.model))

    @contextmanager
    def tapped(self, layers: Sequence[int]) -> Iterator[None]:
        """Capture the features of these layers (see `Features`) in every forward of the block; none if it is empty."""
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
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *,
        prompt_logits: bool = False, window: Window | None = None,
    ) -> Verified:  # fmt: skip
        """Process the prompt with transformers' own prefill (chunks, embeddings, images) and commit it in every row.

        Args:
            input_ids, generation_config: `[B, P]`, and the generation config of this call.
            model_kwargs: Inputs prepared by `generate()`, including our cache; `logits_to_keep` may be changed.
            prompt_logits: Return the logits of all positions (for a prompt in chunks, only of the last chunk).
            window: Keep only the features of these tokens of a prompt that is longer and continues no cache.

        If the model reads the prompt into a new cache (Phi-3, beyond its original length), that cache is taken over.

        Returns:
            Logits `[B, 1, V]` of the last position, or `[B, P, V]`; features of all P positions, or of those within
            the window, if layers are tapped.
        """
        self.padding = PromptPadding.of(model_kwargs.get("attention_mask"))
        if generation_config.prefill_chunk_size is None and "logits_to_keep" in model_kwargs:
            if prompt_logits:
                model_kwargs["logits_to_keep"] = 0  # transformers' value for all positions
            elif self._tap is not None or self.width:
                # with an int, some models (gemma4) skip prompt positions in upper layers; with a tensor they do not
                model_kwargs["logits_to_keep"] = torch.tensor([-1], dtype=torch.long, device=input_ids.device)
        known, embeds, mask = self.cache.start, model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        rows, width = (input_ids if embeds is None else embeds).shape[:2]
        if self._tap is not None:
            self._tap.clear()
            if window is not None and width > window.size and not known:
                everything = torch.ones(rows, width, dtype=torch.bool, device=input_ids.device)
                valid = everything if self.padding is None else self.padding.valid
                first = min(generation_config.prefill_chunk_size or width, width)
                self._tap.choose(ChosenStates(window, valid, first))
        self._prompt_kwargs, self._prompt_length = dict(model_kwargs), input_ids.shape[1]
        self._inputs = _repeated_inputs(model_kwargs)
        outputs, seen = self._read_prompt(input_ids, generation_config, dict(model_kwargs))
        # a prompt after a given cache may repeat the cache's tokens, which the mask always covers
        self._check_written(max(known + 1, width) if mask is None else mask.shape[1], outputs)
        self.cache.commit_all(outputs.logits.shape[0], width)
        positions = model_kwargs.get("position_ids")
        if positions is not None and positions.shape[-1] < self.cache.start - known:
            positions = None  # with virtual tokens before the prompt (prompt tuning), positions are slot indices
        elif self.supports_trees and positions is not None and seen and seen[-1].dim() == positions.dim():
            positions = seen[-1]  # the model may shift them (PaliGemma counts from 1)
        self.positions = Positions.of(positions, self.cache.start, input_ids.device)
        if self.padding is not None:
            self.padding = self.padding.extended_to(self.cache.start)
        logits = outputs.logits if prompt_logits else outputs.logits[:, -1:]
        return Verified(logits, self._features(), *self._layers(outputs))

    def _read_prompt(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        """Run the model over the prompt; return its outputs and the position ids of each of its forwards."""
        seen, thread = list[Tensor](), threading.local()
        thread.is_own = True

        def note_positions(_module: nn.Module, _inputs: Any, named: dict[str, Any]) -> None:
            if hasattr(thread, "is_own") and isinstance(named.get("position_ids"), Tensor):
                seen.append(named["position_ids"])

        handle = self.model.register_forward_pre_hook(note_positions, with_kwargs=True)
        try:
            with faster_products(self.model):
                return prefill(self.model, input_ids, generation_config, model_kwargs), seen
        finally:
            handle.remove()

    def _check_written(self, num_tokens: int, outputs: Any = None) -> None:
        """Check that every layer of the cache holds at least `num_tokens`, committed or not.

        With the outputs of a forward for which the model itself chose another cache with as many tokens, copy them.
        """
        found = self.cache.num_written
        if found >= num_tokens or self.is_draft_view:  # drafting may run some layers only
            return
        other: Any = next((outputs[name] for name in CACHE_ARGUMENTS if outputs is not None and name in outputs), None)
        if isinstance(self.cache, TreeCache) and type(other) is DynamicCache and other.get_seq_length() == num_tokens:
            self.cache.replace(other)
            return
        raise UnsupportedModelError(
            f"{type(self.model).__name__} drops or ignores the cache for a text of this length: it wrote {found} of "
            f"{num_tokens} tokens to it.",
            "Use speculative=None for this text.",
        )

    def verify(self, tree: TokenTree) -> Verified:
        """Run the model over the whole tree; its keys and values are appended to the cache, but not committed."""
        if self._tap is not None:
            self._tap.clear()
        with expert_products(self.model, len(tree.tokens) * max(tree.num_nodes, self.width)):
            outputs = self._run(tree)
        return Verified(outputs.logits, self._features(), *self._layers(outputs))

    def _step_inputs(self, tokens: Tensor) -> dict[str, Any]:
        """Return the additional inputs of a verify forward over `tokens` `[B, N]`."""
        inputs = self._inputs.items()
        columns = {name: value.expand(tokens.shape) if isinstance(value, Tensor) else value for name, value in inputs}
        return {**columns, **self._outputs}

    def _features(self) -> Features | None:
        return None if self._tap is None else self._tap.take()

    def _layers(self, outputs: Any) -> tuple[Any, Any]:
        return (
            outputs.hidden_states if self._outputs.get("output_hidden_states") else None,
            outputs.attentions if self._outputs.get("output_attentions") else None,
        )


def _repeated_inputs(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs that plain `generate()` passes to every forward: settings, and one column of per-token inputs."""
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
"""Inputs of the prompt's forward that verify forwards set themselves, or do not need."""
