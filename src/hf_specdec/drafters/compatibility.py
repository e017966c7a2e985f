"""Test whether a drafter predicts a model's tokens at all, which matching tensor sizes do not prove."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TRIAL_PROMPTS = 4
TRIAL_TOKENS = 48
MIN_ACCEPTANCE = 0.1
"""Share of accepted first tokens below which a drafter costs more than it saves."""


def try_drafter(model: Any, name: str, prompts: Sequence[Tensor] | None = None) -> float:
    """Measure how often the first token of a draft is accepted in greedy decoding; warn if that is rare.

    Does not change the random state of the process.

    Args:
        model: An attached model.
        name: Name of a registered drafter that can draft the static tree `[(0,)]`.
        prompts: Token ids, each `[1, P]`; None samples `TRIAL_PROMPTS` prompts from the model.

    Returns:
        The share of steps in which the first token is accepted, 0.0 without any step. Below `MIN_ACCEPTANCE`, a
        warning is issued.

    Raises:
        InvalidConfigError: The drafter rejects this tree.
    """
    drafted = accepted = 0
    for prompt in _sampled_prompts(model) if prompts is None else prompts:
        ids = prompt.to(model.device)
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TRIAL_TOKENS, do_sample=False,
            return_dict_in_generate=True, speculative={"method": name, "tree": [(0,)]},
        )  # fmt: skip
        taken = [length for row in output.speculation.accepted_per_step for length in row]
        drafted, accepted = drafted + len(taken), accepted + sum(length > 1 for length in taken)
    share = accepted / max(drafted, 1)
    if share < MIN_ACCEPTANCE:
        warnings.warn(
            f"The drafter {name!r} predicted {accepted} of {drafted} tokens of this model. It was probably made for "
            "another model or another version of it; speculation will not be faster.",
            stacklevel=3,
        )
    return share


def _sampled_prompts(model: Any) -> list[Tensor]:
    """Sample prompts with fixed seeds, starting from the model's BOS token (token 0 if it has none or several)."""
    first = model.generation_config.bos_token_id
    begin = torch.full((1, 1), first if isinstance(first, int) else 0, dtype=torch.long, device=model.device)
    devices = [] if model.device.type == "cpu" else [model.device]
    prompts = []
    with torch.random.fork_rng(devices, device_type=model.device.type if devices else "cpu"):
        for seed in range(TRIAL_PROMPTS):
            torch.manual_seed(seed)
            prompts.append(model.generate(
                input_ids=begin, attention_mask=torch.ones_like(begin), do_sample=True, speculative=None,
                max_new_tokens=TRIAL_TOKENS, min_new_tokens=TRIAL_TOKENS // 2,
            ))  # fmt: skip
    return prompts
