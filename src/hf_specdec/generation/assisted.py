"""Drafters for the assistant model of one `generate()` call, and checks of the arguments that belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import GenerationConfig

from hf_specdec.checkpoints.formats import drafts_in_parallel
from hf_specdec.config import COMBINED, SpeculativeConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.pard import PardDrafter, fields_of
from hf_specdec.errors import InvalidConfigError, UnsupportedGenerationError
from hf_specdec.records import shortened

ASSISTED, PARD = "draft_model", "pard"
"""Names of the methods that draft with an assistant model, token by token and several tokens per forward."""


@dataclass(frozen=True, slots=True)
class Assistant:
    """The arguments of `generate()` that belong to an assistant: `tokenizer` also serves stop strings."""

    model: Any
    tokenizer: Any = None
    assistant_tokenizer: Any = None

    @classmethod
    def taken_from(cls, arguments: dict[str, Any]) -> Assistant:
        """Remove an assistant model and its tokenizer from the arguments of a call, which keeps the target's."""
        assistant_tokenizer = arguments.pop("assistant_tokenizer", None)
        return cls(arguments.pop("assistant_model"), arguments.get("tokenizer"), assistant_tokenizer)

    def tokenizers(self) -> dict[str, Any]:
        """Return both tokenizers as arguments of a drafter; empty if the assistant has the target's.

        Raises:
            InvalidConfigError: Only that of the assistant is given.
        """
        if self.assistant_tokenizer is None:
            return {}
        if self.tokenizer is None:
            raise InvalidConfigError(
                "`assistant_tokenizer` is given, but `tokenizer`, that of the model itself, is not.",
                "Pass both, or neither if they are the same.",
            )
        return {"tokenizer": self.tokenizer, "assistant_tokenizer": self.assistant_tokenizer}


def assisted_drafters(
    assistant: Assistant, config: SpeculativeConfig, generation_config: GenerationConfig, made: dict[str, Drafter]
) -> dict[str, Drafter]:
    """Return drafters for the call's assistant model by method, and store them in `made`.

    Those of the last call are used again if they fit. If the config names neither method, there is one drafter: a PARD
    assistant drafts several tokens per forward, any other token by token. The latter samples its drafts if the call
    samples losslessly with chains of this drafter alone.

    Raises:
        InvalidConfigError: See `Assistant.tokenizers`.
        UnsupportedGenerationError: Neither the method nor one of the `methods` drafts with an assistant model, or the
            assistant is not a loaded model.
    """
    if config.method not in (ASSISTED, PARD, *COMBINED):
        raise UnsupportedGenerationError(
            f"`assistant_model` has no effect with speculative={config.method!r}.",
            f"Use speculative={ASSISTED!r}, {PARD!r}, 'hybrid' or 'auto', or drop it.",
        )
    if not isinstance(assistant.model, nn.Module):
        raise UnsupportedGenerationError(
            f"`assistant_model` must be a loaded model, got {shortened(assistant.model)}.",
            "Load it: AutoModelForCausalLM.from_pretrained(...).",
        )
    named = {ASSISTED, PARD} & {config.method, *(config.methods or ())}
    if config.methods and not named:
        raise UnsupportedGenerationError(
            f"`assistant_model` has no effect with methods={list(config.methods)}.",
            f"Add {ASSISTED!r} to them, or drop it.",
        )
    chain = config.top_k in (None, 1) and config.tree is None
    sample = bool(generation_config.do_sample) and config.method == ASSISTED and chain
    sample = sample and config.acceptance in ("auto", "rejection", "block")
    tokenizers = assistant.tokenizers()
    drafters: dict[str, Drafter] = {}
    for method in named or {PARD if drafts_in_parallel(fields_of(assistant.model)) else ASSISTED}:
        if method == PARD:
            drafter: DraftModelDrafter = PardDrafter(assistant.model, **tokenizers)
        else:
            drafter = DraftModelDrafter(assistant.model, sample=sample, **tokenizers)
        drafters[method] = drafter.or_known(made.get(method))
    made.update(drafters)
    return drafters


def check_no_assistant(mode_kwargs: Mapping[str, Any]) -> None:
    """Refuse an assistant or its tokenizer among the arguments that the mixin has left to transformers.

    Raises:
        UnsupportedGenerationError: An assistant, but `speculative` is only stored in the generation config.
        InvalidConfigError: A tokenizer without an assistant.
    """
    if mode_kwargs.get("assistant_model") is not None:
        raise UnsupportedGenerationError(
            "`assistant_model` is ambiguous if `speculative` is only stored in the generation config.",
            'Also pass speculative="draft_model", or speculative=None for the assisted generation of transformers.',
        )
    if mode_kwargs.get("assistant_tokenizer") is not None:
        raise InvalidConfigError(
            "`assistant_tokenizer` is given without `assistant_model`.",
            "Pass both to this call, or drop it; a drafter that was added before has its own tokenizers.",
        )
