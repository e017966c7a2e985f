"""Texts written by a target, on which the readings of a draft head are compared (`reading_trial.py`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from hf_specdec.checkpoints.target_config import first_sentence
from hf_specdec.transformers_private import model_name

logger = logging.getLogger(__name__)

PROMPTS = (
    "What causes the tides of the ocean?",
    "Write a short letter to a friend about a walk in the mountains.",
    "Write a Python function that returns the largest number of a list.",
    "A train leaves at 9:40 and arrives at 12:15. How long does the journey take? Explain each step.",
    "Give three tips for learning a new language.",
    "Summarise in two sentences why the Roman Empire declined.",
)
"""Questions for chat models."""

TEXT_TOKENS = 48
"""Tokens of each continuation."""


@dataclass(frozen=True, slots=True)
class TrialText:
    """A prompt and the target's continuation."""

    token_ids: Tensor  # [1, T]
    prompt_length: int


def write_texts(model: Any) -> list[TrialText]:
    """Let a target continue a few prompts by `TEXT_TOKENS` tokens each, and return the texts.

    A chat model whose tokenizer is on this machine answers `PROMPTS` greedily. Any other model samples as many texts
    from its BOS token (token 0 if it has none or several), with a fixed seed. The random state of the process does not
    change; the model's generation config is replaced during the call.

    Args:
        model: An attached model.
    """
    encoded = _chat_prompts(model)
    if encoded is None:
        first = model.generation_config.bos_token_id
        begin = first if isinstance(first, int) else 0
        ids = torch.full((len(PROMPTS), 1), begin, dtype=torch.long, device=model.device)
        mask = torch.ones_like(ids)
    else:
        ids, mask = encoded["input_ids"].to(model.device), encoded["attention_mask"].to(model.device)
    stored = model.generation_config
    tokens = {name: getattr(stored, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = range(torch.accelerator.device_count()) if accelerator is not None else []
    with torch.random.fork_rng(devices, device_type="cpu" if accelerator is None else accelerator.type):
        torch.manual_seed(0)
        try:
            model.generation_config = GenerationConfig(**tokens)  # without the user's other settings
            written = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=encoded is None, speculative=None,
                max_new_tokens=TEXT_TOKENS, min_new_tokens=TEXT_TOKENS,
            )  # fmt: skip
        finally:
            model.generation_config = stored
    return [
        TrialText(row[len(mask_row) - length :][None], length)
        for row, mask_row, length in zip(written, mask, mask.sum(-1).tolist(), strict=True)
    ]


def _chat_prompts(model: Any) -> Any:
    """Return `PROMPTS` as left-padded ids and mask `[B, P]`; None without a local tokenizer whose template works."""
    name = model_name(model.config)
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
        if not tokenizer.chat_template:
            return None
        tokenizer.padding_side = "left"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in PROMPTS],
            add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
    except Exception as error:  # tokenizers and templates raise many types; sampled texts serve as well
        logger.info("Texts are sampled, because the tokenizer of %s cannot be used: %s", name, first_sentence(error))
        return None
