"""The target model seen from the decoding loop: prefill a prompt, verify a tree.

Reaches the model only through its public forward: 4D masks, position ids, a cache, one forward hook. Nothing
here is per architecture; whether a model can do this at all, `probe.py` finds out. Before: `tree.py`, `masks.py`,
`cache.py`. After: `accept.py`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.cache import TreeCache
from hf_specdec.chain_cache import ChainCache
from hf_specdec.errors import DrafterMismatchError, UnsupportedModelError
from hf_specdec.masks import MaskLayout, Positions, PromptPadding, tree_masks
from hf_specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Verification:
    """What one target forward says about a tree (N nodes) or about a prompt (its last position only: N = 1)."""

    logits: Tensor  # [B, N, V], the model's own dtype
    # [B, N, layers * D] the hidden states that the drafter reads; a prompt: of all P positions; None: it reads none
    features: Tensor | None
    hidden_states: tuple[Tensor, ...] | None = None  # per layer [B, N or P, D]; None unless asked for
    attentions: tuple[Tensor | None, ...] | None = None  # per layer [B, H, N or P, slots]; None unless asked for


# ----------------------------------------------------------------------------------------------- parts of the model

LAST = -1
"""Index of the last hidden state, behind the final norm: what lm_head reads."""


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the text decoder, also of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def execution_device(model: PreTrainedModel) -> torch.device:
    """Where the model's forwards take their inputs; an offloaded model's weights lie nowhere, but its hook says."""
    if model.device.type != "meta":
        return model.device
    return torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model's forward takes its cache (state-space models have another one)."""
    parameters = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in parameters else "past_key_values"


def find_backbone(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the decoder layers and the final norm, whose output is what lm_head reads; the layers.

    `base_model` and `get_decoder()` return the whole model for some architectures, so the parent of the first
    list of `num_hidden_layers` modules is taken, under `get_decoder()` first (a vision tower comes later).

    Raises:
        UnsupportedModelError: No such list.
    """
    num_layers = text_config(model).num_hidden_layers
    for root in (model.get_decoder(), model):
        for module in root.modules() if root is not None else ():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                    return module, child
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers to take features from."
    )


def lm_head_rows(model: PreTrainedModel, token_ids: Tensor | None) -> nn.Module:
    """The target's lm_head, cut down to some tokens where it is a plain linear layer.

    Args:
        model: The target.
        token_ids: `[Vd]` target ids, or None for all.

    Returns:
        A module from features `[..., D]` to logits `[..., Vd]`. A quantised or otherwise unusual lm_head is run
        whole and its logits are selected: same numbers, no saving.
    """
    lm_head = model.get_output_embeddings()
    if token_ids is None:
        return lm_head
    # hooks move weights in and out (offloading) or put shards together (tensor parallelism): only they know how
    hooked = lm_head._forward_hooks or lm_head._forward_pre_hooks or hasattr(lm_head, "_hf_hook")
    if hooked or type(lm_head) is not nn.Linear or type(lm_head.weight) is not nn.Parameter:
        return _SelectedLogits(lm_head, token_ids)
    if not lm_head.weight.is_floating_point() or lm_head.weight.shape[0] != lm_head.out_features:
        return _SelectedLogits(lm_head, token_ids)
    rows = nn.Linear(lm_head.in_features, len(token_ids), bias=lm_head.bias is not None, device="meta")
    token_ids = token_ids.to(lm_head.weight.device)
    rows.weight = nn.Parameter(lm_head.weight.detach()[token_ids], requires_grad=False)
    if lm_head.bias is not None:
        rows.bias = nn.Parameter(lm_head.bias.detach()[token_ids], requires_grad=False)
    return rows


class _SelectedLogits(nn.Module):
    def __init__(self, lm_head: nn.Module, token_ids: Tensor) -> None:
        super().__init__()
        self.lm_head, self.token_ids = lm_head, token_ids

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits.index_select(-1, self.token_ids.to(logits.device))


class FeatureTap:
    """Context manager: keeps hidden states of this thread's forwards, then unhooks itself.

    Two threads may generate on one model, so a hook ignores the forwards of any thread but its own.

    Args:
        model: The target.
        layers: Which hidden states, counted as transformers' `hidden_states`: 0 is the embedding, i the output of
            decoder layer i-1, and `LAST` (also the number of layers) the last one behind the final norm.

    Raises:
        DrafterMismatchError: The target has no such layer.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = (LAST,)) -> None:
        self._backbone, self._modules = find_backbone(model)
        depth = len(self._modules)
        if any(not LAST <= layer <= depth for layer in layers):
            raise DrafterMismatchError(
                f"{type(model).__name__} has hidden states 0 to {depth}, the head reads {list(layers)}.",
                "It was trained for a deeper model.",
            )
        self._layers = [LAST if layer == depth else layer for layer in layers]
        self._thread = threading.get_ident()
        self.clear()

    def __enter__(self) -> FeatureTap:
        self._handles = [self._hook(layer) for layer in dict.fromkeys(self._layers)]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: int) -> Any:
        def keep_input(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._keep(layer, inputs[0] if inputs else named["hidden_states"])

        def keep_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                output = output[0] if isinstance(output, tuple) else output.last_hidden_state
            self._keep(layer, output)

        if layer == 0:
            return self._modules[0].register_forward_pre_hook(keep_input, with_kwargs=True)
        module = self._backbone if layer == LAST else self._modules[layer - 1]
        return module.register_forward_hook(keep_output)

    def _keep(self, layer: int, hidden: Tensor) -> None:
        if threading.get_ident() == self._thread:
            self._kept[layer].append(hidden)

    def clear(self) -> None:
        """Forget what was kept: the forwards of others, such as a guidance processor's."""
        self._kept: dict[int, list[Tensor]] = {layer: [] for layer in self._layers}

    def take(self) -> Tensor:
        """`[B, T, len(layers) * D]` features since the last call (of several forwards where a prompt came in chunks).

        The hidden states stand side by side in the order of `layers`, on the device of the last.
        """
        whole = {layer: kept[0] if len(kept) == 1 else torch.cat(kept, dim=1) for layer, kept in self._kept.items()}
        self.clear()
        if len(self._layers) == 1:
            return whole[self._layers[0]]
        device = whole[self._layers[-1]].device
        return torch.cat([whole[layer].to(device) for layer in self._layers], dim=-1)


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
