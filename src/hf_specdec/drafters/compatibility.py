"""A drafter on trial: does it draft this model's tokens at all? Sizes that fit do not say so."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TRIAL_PROMPTS = 4
TRIAL_TOKENS = 48
ENOUGH = 0.1
"""Share of accepted first tokens below which a drafter is of no use: it costs more than it saves."""


def try_drafter(model: Any, name: str, prompts: Sequence[Tensor] | None = None) -> float:
    """How often the first token that a drafter proposes is the model's own choice.

    The random numbers of the process are as they were afterwards.

    Args:
        model: An attached model.
        name: A registered drafter.
        prompts: Token ids, each `[1, P]`; None has the model sample some text of its own to go on from.

    Returns:
        The share of accepted first tokens; below 0.1 there is a warning as well.
    """
    drafted = accepted = 0
    for prompt in _invented(model) if prompts is None else prompts:
        ids = prompt.to(model.device)
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TRIAL_TOKENS, do_sample=False,
            return_dict_in_generate=True, speculative={"method": name, "tree": [(0,)]},
        )  # fmt: skip
        taken = [length for row in output.speculation.accepted_per_step for length in row]
        drafted, accepted = drafted + len(taken), accepted + sum(length > 1 for length in taken)
    share = accepted / max(drafted, 1)
    if share < ENOUGH:
        warnings.warn(
            f"The drafter {name!r} guessed {accepted} of {drafted} tokens of this model: it was probably made for "
            "another one (or for another version of it), and speculation will not be faster.",
            stacklevel=3,
        )
    return share


def _invented(model: Any) -> list[Tensor]:
    """Beginnings of text, sampled by the model after its first token, with a seed of their own."""
    first = model.generation_config.bos_token_id
    begin = torch.full((1, 1), first if isinstance(first, int) else 0, dtype=torch.long, device=model.device)
    devices = [] if model.device.type == "cpu" else [model.device]
    prompts = []
    with torch.random.fork_rng(devices, device_type=model.device.type if devices else "cpu"):
        for seed in range(TRIAL_PROMPTS):
            torch.manual_seed(seed)
            prompts.append(
                model.generate(
                    input_ids=begin,
                    attention_mask=torch.ones_like(begin),
                    do_sample=True,
                    speculative=None,
                    max_new_tokens=TRIAL_TOKENS,
                    min_new_tokens=TRIAL_TOKENS // 2,
                )
            )
    return prompts
