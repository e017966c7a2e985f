"""The target model seen from the decoding loop: can it verify a tree, and then prefill and verify.

Reaches the model only through its public forward: 4D masks, position ids, a cache, one forward hook. Nothing
here is per architecture. Before: `tree.py`, `masks.py`, `cache.py`. After: `accept.py`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.cache import CacheLayout, TreeCache, measured_layout
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.masks import LAYER_KINDS, MaskLayout, PromptPadding, position_ids, tree_masks
from hf_specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Verification:
    """What one target forward says about a tree (N nodes) or about a prompt (its last position only: N = 1)."""

    logits: Tensor  # [B, N, V], the model's own dtype
    hidden: Tensor | None  # [B, N, D] post-final-norm; a prompt: all P positions; None unless asked for


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What gate and probe found out about a model; plain data, valid for one dtype, device and attention."""

    cache_layout: CacheLayout
    fingerprint: tuple[Any, ...]


# ----------------------------------------------------------------------------------------------- parts of the model


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the text decoder, also of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def find_backbone(model: PreTrainedModel) -> nn.Module:
    """The module that holds the decoder layers and the final norm: its output is what lm_head reads.

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
                    return module
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
    if type(lm_head) is not nn.Linear or not lm_head.weight.is_floating_point() or lm_head.weight.is_meta:
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
    """Context manager: keeps the backbone's last hidden states of this thread's forwards, then unhooks itself.

    Two threads may generate on one model, so a hook ignores the forwards of any thread but its own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._backbone = find_backbone(model)
        self._thread = threading.get_ident()
        self._kept: list[Tensor] = []

    def __enter__(self) -> FeatureTap:
        self._handle = self._backbone.register_forward_hook(self._keep)
        return self

    def __exit__(self, *exc: object) -> None:
        self._handle.remove()

    def _keep(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._kept.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    def take(self) -> Tensor:
        """`[B, T, D]` features of the forwards since the last call (several where a prompt came in chunks)."""
        kept, self._kept = self._kept, []
        return kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)


# ----------------------------------------------------------------------------------------------- gate and probe


def gate(model: Any) -> None:
    """Refuse, from class and configuration alone, what can never verify a tree.

    Raises:
        UnsupportedModelError: Naming the reason.
    """

    def refuse(reason: str, hint: str = "Use plain generate() for it.") -> None:
        raise UnsupportedModelError(f"{type(model).__name__} cannot verify a tree of tokens: {reason}.", hint)

    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generate"):
        refuse("it is not a transformers model with generate()", "Load it with AutoModelForCausalLM.")
    if model.config.is_encoder_decoder:
        refuse("it is an encoder-decoder model")
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        refuse("its layers carry a recurrent state, which cannot branch")
    parameters = inspect.signature(model.forward).parameters
    for name in ("past_key_values", "attention_mask", "position_ids"):
        if name not in parameters:
            refuse(f"its forward takes no `{name}`, so the place of a node cannot be told (alibi or custom attention)")
    config = text_config(model)
    if getattr(config, "alibi", False):
        refuse("its alibi bias counts physical cache slots")
    strange = set(getattr(config, "layer_types", None) or ()) - set(LAYER_KINDS)
    if strange:
        refuse(f"its layers of type {', '.join(sorted(strange))} hold no plain keys and values")
    if config._attn_implementation not in ("sdpa", "eager"):
        refuse(
            f"its attention {config._attn_implementation!r} takes no custom mask",
            'Call model.set_attn_implementation("sdpa") first.',
        )


def fingerprint(model: PreTrainedModel) -> tuple[Any, ...]:
    """What the probe's findings depend on: a change of any part calls for a new probe."""
    devices = tuple(sorted(getattr(model, "hf_device_map", {}).items(), key=str))
    return model.dtype, model.device, text_config(model)._attn_implementation, str(devices)


@torch.no_grad()
def inspect_target(model: PreTrainedModel) -> TargetFacts:
    """Gate, then probe: verify a tiny tree on the real model and compare every path with a plain forward.

    Costs five forwards of at most 20 tokens and changes nothing.

    Raises:
        UnsupportedModelError: The model fails or disagrees with itself; the text says where.
    """
    gate(model)
    with _evaluation_mode(model):
        return TargetFacts(_probe(model), fingerprint(model))


def _probe(model: PreTrainedModel) -> CacheLayout:
    config = text_config(model)
    prompt = (torch.arange(13, device=model.device) * 7 + 3)[None] % config.vocab_size
    #    root ─ child ─ grandchild
    #         └ sibling
    tree = TokenTree((torch.tensor([[11, 5, 23, 17]], device=model.device)) % config.vocab_size,
                     torch.tensor([-1, 0, 0, 1], device=model.device))  # fmt: skip
    cache = TreeCache([None] * config.num_hidden_layers, capacity=32)
    target = Target(model, cache, padding=None)

    def plain(tokens: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits
        return logits[:, -1].float()

    def agree(got: Tensor, wanted: Tensor) -> bool:
        tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
        return bool((got.float() - wanted).norm() <= tolerance * wanted.norm().clamp(min=1e-6))

    try:
        chain = TokenTree(prompt, torch.arange(-1, prompt.shape[1] - 1, device=model.device))
        target.verify(chain)
        cache.commit([range(prompt.shape[1])])
        logits = target.verify(tree).logits[0]
        cache.commit([[0, 1, 3]])
        root = TokenTree(tree.tokens[:, 2:3], torch.tensor([-1], device=model.device))
        continued = target.verify(root).logits[0, 0]
        wanted = {
            "a path of the tree": (logits[3], torch.cat([prompt, tree.tokens[:, [0, 1, 3]]], dim=-1)),
            "a sibling in the tree": (logits[2], torch.cat([prompt, tree.tokens[:, [0, 2]]], dim=-1)),
            "the token after a committed path": (continued, torch.cat([prompt, tree.tokens[:, [0, 1, 3, 2]]], dim=-1)),
        }
        wrong = [name for name, (got, tokens) in wanted.items() if not agree(got, plain(tokens))]
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot verify a tree of tokens: its forward failed with "
            f"{type(error).__name__}: {error}.",
            "Use plain generate() for it.",
        ) from error
    if wrong:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot verify a tree of tokens: its logits for {wrong[0]} differ from a plain "
            "forward's, so its attention does not follow the mask and position ids it is given.",
            "Use plain generate() for it.",
        )
    return measured_layout(cache)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off, then every module back in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# ----------------------------------------------------------------------------------------------- prefill and verify


class Target:
    """One generation's view of the model: its cache, its prompt's padding, and the two forwards.

    Args:
        model: The target.
        cache: An empty cache of this generation.
        padding: Where the prompt is padding.
        tap: Keeps features where the drafter asks for them.
    """

    def __init__(
        self, model: PreTrainedModel, cache: TreeCache, padding: PromptPadding | None, tap: FeatureTap | None = None
    ) -> None:
        self.model, self.cache, self.padding, self.tap = model, cache, padding, tap
        self.mask_layout = MaskLayout.of(text_config(model))

    def prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> Verification:
        """Run the prompt by transformers' own prefill (chunking, embeddings) and commit it in every row.

        Args:
            input_ids: `[B, P]`.
            generation_config: Of this call.
            model_kwargs: What `generate()` prepared; holds our cache.

        Returns:
            Logits `[B, 1, V]` of the last position, and the features of all P where tapped.
        """
        if self.tap is not None and generation_config.prefill_chunk_size is None and "logits_to_keep" in model_kwargs:
            # an int lets some models (gemma4) skip prompt positions in upper layers; a tensor keeps them all
            embeddings = model_kwargs.get("inputs_embeds")
            length = (input_ids if embeddings is None else embeddings).shape[1]
            model_kwargs["logits_to_keep"] = torch.tensor([length - 1], device=input_ids.device)
        outputs = self.model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)
        self.cache.commit_all(outputs.logits.shape[0])
        return Verification(outputs.logits[:, -1:], self._features())

    def verify(self, tree: TokenTree) -> Verification:
        """One forward over the whole tree; its keys are appended to the cache, not committed."""
        ancestors = tree.ancestor_mask()
        lengths = self.cache.lengths or [0] * tree.tokens.shape[0]
        outputs = self.model(
            input_ids=tree.tokens,
            attention_mask=tree_masks(self.mask_layout, ancestors, lengths, self.padding, self.model.dtype),
            position_ids=position_ids(ancestors.sum(-1) - 1, lengths, self.padding),
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        return Verification(outputs.logits, self._features())

    def _features(self) -> Tensor | None:
        return None if self.tap is None else self.tap.take()
