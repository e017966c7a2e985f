"""Fingerprint of a model's forward, cheap enough to compare before every call.

The results of the probe are valid while the fingerprint is unchanged. Weight values are not part of it, so training
does not invalidate them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_specdec.transformers_private import attention_name
from hf_specdec.verification.model import text_config

HARMLESS_HOOKS = (
    "transformers.utils.output_capturing",
    "hf_specdec.verification.features",
    "hf_specdec.verification.target",
    "hf_specdec.drafters.experimental.early_exit",
)
"""Modules whose hooks only read hidden states, so they do not change the forward."""

GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""Names of hooks of transformers and peft that only set `requires_grad` of the embeddings; with gradient
checkpointing, a trainer registers them again after every generation."""

FLAGS = ("training", "gradient_checkpointing", "_disable_adapters", "_active_adapter", "merged_adapters")
"""Module attributes that change the forward: train mode, checkpointing, PEFT adapters."""

_MASK_FIELDS = ("sliding_window", "attention_chunk_size", "layer_types")
"""Configuration fields that determine the masks, together with the attention implementation."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Modules, hooks, modes, weight types and settings of a forward; two are equal if none of these changed.

    It holds only weak references to modules.
    """

    modules: tuple[Any, ...]  # names, types and identities, in traversal order
    forwards: tuple[Any, ...]  # `forward` methods of instances and of classes
    hooks: tuple[Any, ...]
    modes: tuple[Any, ...]
    weights: tuple[Any, ...]  # types, dtypes and devices
    config: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Fingerprint:
        """Compute the fingerprint by traversing the modules (0.6 ms for 400 modules on a CPU core)."""
        modules, forwards, hooks, modes, weights = [], [], [], [], []
        classes: dict[type | None, Any] = {}
        seen: set[int] = set()
        stack: list[tuple[str, nn.Module]] = [("", model)]
        while stack:
            name, module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            kind, attributes = type(module), module.__dict__
            # weak references, not ids: a dead one never equals that of a new module at the same address
            # the root's class is left out, because `attach` changes it but not its forward
            modules.append((name, None if module is model else kind, weakref.ref(module)))
            classes[kind if module is not model else None] = getattr(kind, "forward", None)
            if "forward" in attributes:
                try:
                    forward: Any = weakref.ref(attributes["forward"])
                except TypeError:  # the callable does not support weak references
                    forward = id(attributes["forward"])
                forwards.append((len(modules), forward))
            for registered in (module._forward_hooks, module._forward_pre_hooks):
                if registered:  # as a list: a call in another thread may add or remove its own
                    found = [*registered.items()]
                    hooks += [(len(modules), number) for number, hook in found if not _is_harmless(hook)]
            flags = [attributes.get(flag, False) for flag in FLAGS]
            modes.append(tuple([value if isinstance(value, bool | str) else str(value) for value in flags]))
            weights.append(tuple([(type(p), p.dtype, p.device) for p in module._parameters.values() if p is not None]))
            stack.extend([(child, part) for child, part in module._modules.items() if part is not None])
        config = text_config(model)
        settings = [attention_name(config), *(str(getattr(config, field, None)) for field in _MASK_FIELDS)]
        settings.append(str(getattr(model, "hf_device_map", None)))
        functions = (*forwards, *classes.items())
        return cls(tuple(modules), functions, tuple(hooks), tuple(modes), tuple(weights), tuple(settings))

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the names of the fields that differ; empty if the fingerprints are equal."""
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]


def _is_harmless(hook: Any) -> bool:
    module = str(getattr(hook, "__module__", None))
    if getattr(hook, "__name__", None) in GRADIENT_HOOKS:
        return module.startswith(("transformers.", "peft."))
    return module in HARMLESS_HOOKS
