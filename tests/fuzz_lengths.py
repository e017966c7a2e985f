"""Differential fuzz of lengths: texts around every limit of a model, plain against speculative, in float32.

    python tests/fuzz_lengths.py --count 2000 [--seed 0] [--models phi3 gpt2 ...]

A case takes a model of `lengths.py` and lets prompt and answer end below, at or beyond one of its limits: one prompt
or a padded batch, with or without a cache that plain `generate()` has filled, in chunks, greedy or sampled. Each call
has a fresh copy of the model. A case ends *equal* (ids, caches if they are returned or handed in, and the
length that dynamic frequencies are left at), *refused* or *invalid* as in `fuzz.py`; a refusal is counted for its
model. Anything else fails.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import fuzz
import lengths
import zoo
from hf_specdec import SpeculativeGenerationMixin, UnsupportedGenerationError, UnsupportedModelError
from hf_specdec.verification.model import CACHE_FIELD

NAMES = tuple(name for name, limited in lengths.LIMITED.items() if limited.architecture in zoo.CONFIG_MAPPING)
METHODS = ("prompt_lookup", "token_recycling", "auto")
TOLERANCE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-3}
"""Caches: rounding stays below 1e-4, a wrong position or frequency is above 1e-2."""


@functools.cache
def attached(name: str) -> Any:
    """The model with the mixin, before its first call. Every case runs a copy: nothing learned before can matter."""
    return SpeculativeGenerationMixin.attach(copy.deepcopy(lengths.build(name)))


@dataclass
class Case:
    """One pair of calls. The cache handed in, if any, holds an earlier turn: a prompt and its plain answer."""

    model: str
    ids: torch.Tensor
    mask: torch.Tensor | None
    speculative: Any
    turn: tuple[int, int] = (0, 0)  # tokens of the earlier turn's prompt and answer; no cache without an answer
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        padded = "" if self.mask is None else f" padded {(self.mask == 0).sum(-1).tolist()}"
        turn = f" after a turn of {self.turn}" if self.turn[1] else ""
        return f"{self.model} {tuple(self.ids.shape)}{padded}{turn} {self.speculative} {self.options}"


def case(number: int, names: tuple[str, ...] = NAMES) -> Case:
    """The case of that number."""
    rng = random.Random(number)
    name = names[number % len(names)]
    limited = lengths.LIMITED[name]
    limit = rng.choice(limited.limits)
    generator = torch.Generator().manual_seed(number)
    batch = rng.choice([1, 1, 1, 2, 3])
    length = max(4, limit + rng.choice([-24, -9, -5, -3, -1, 0, *([] if limited.ends else [1, 6])]))
    period = rng.choice([2, 3, 5, 7, length])
    ids = torch.randint(3, zoo.VOCAB_SIZE, (batch, period), generator=generator)
    ids = ids.repeat(1, -(-length // period))[:, :length]
    answered = rng.choice([1, 4, 12]) if rng.random() < 0.3 else 0
    prompt = length // 2 - answered if answered else length
    if prompt < 4:
        prompt, answered = length, 0
    mask = None
    if rng.random() < (0.7 if batch > 1 else 0.2):
        mask = torch.ones_like(ids)
        for row in range(batch):
            mask[row, : min(rng.choice([0, 0, 1, 3, 9, prompt // 2, prompt - 2]), prompt - 2)] = 0
        ids = ids.masked_fill(mask == 0, 0)
    new = rng.choice([1, 7, 14, 25, 40])
    if limited.ends and rng.random() < 0.9:  # plain never reads its last token
        new = rng.choice([limit + 1 - length, max(1, limit - length), max(1, min(new, limit + 1 - length))])
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": batch == 1 and rng.random() < 0.3}
    if rng.random() < 0.3:  # rows that end early leave the batch
        options["eos_token_id"] = rng.sample(range(3, zoo.VOCAB_SIZE), rng.choice([2, 9, 20]))
    if rng.random() < 0.2:
        options["prefill_chunk_size"] = rng.choice([7, 16, 33, limit])
    if rng.random() < 0.3:
        options["return_dict_in_generate"] = True
    speculative: Any = rng.choice(METHODS)
    if rng.random() < 0.5:
        speculative = {"method": speculative, "num_draft_tokens": rng.choice([1, 3, 8, 16])}
    return Case(name, ids, mask, speculative, (prompt, answered), options, number)


def run(made: Case, speculative: Any) -> tuple[Any, Any, list[int]]:
    """One call: its output, the cache handed in, and the lengths that the model's frequencies were left at."""
    model = copy.deepcopy(attached(made.model))
    ids, mask, options = made.ids, made.mask, dict(made.options)
    cache = None
    prompt, answered = made.turn
    if answered:
        earlier = model.generate(
            ids[:, :prompt], attention_mask=None if mask is None else mask[:, :prompt], do_sample=False,
            max_new_tokens=answered, return_dict_in_generate=True,
        )  # fmt: skip
        cache = options[CACHE_FIELD] = earlier[CACHE_FIELD]
        ids = torch.cat([earlier.sequences, ids[:, prompt + answered :]], dim=1)
    if mask is not None:
        options["attention_mask"] = mask
    torch.manual_seed(made.seed)
    output = model.generate(ids, **options, speculative=speculative)
    return output, cache, lengths.grown(model)


def check(made: Case) -> str:
    """Compare the two calls.

    Returns:
        "equal", "refused" or "invalid".

    Raises:
        AssertionError: They differ.
    """
    try:
        plain, cache, left_at = run(made, None)
    except Exception as error:
        try:
            run(made, made.speculative)
        except Exception:
            return "invalid"
        raise AssertionError(f"plain generate raises {error!r}, the speculative call does not") from error
    try:
        ours, our_cache, ours_left_at = run(made, made.speculative)
    except (UnsupportedGenerationError, UnsupportedModelError):
        return "refused"
    fuzz.compare(plain, ours, made.mask, TOLERANCE)
    if cache is not None:
        fuzz.compare_caches(cache, our_cache, made.mask, TOLERANCE)
    assert left_at == ours_left_at, f"frequencies are left at {ours_left_at}, after plain at {left_at}"
    return "equal"


def main() -> None:
    """Run many cases; the exit status is 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--models", nargs="*", default=list(NAMES), choices=NAMES, metavar="MODEL")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in arguments.models}
    for number in range(arguments.seed, arguments.seed + arguments.count):
        made = case(number, tuple(arguments.models))
        try:
            outcomes[made.model][check(made)] += 1
        except Exception as error:
            outcomes[made.model]["DIFFERENT"] += 1
            print(f"case {number}: {made}\n  {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-4)
    for name, counts in outcomes.items():
        print(f"{name}: {dict(counts)}")
    total = sum(outcomes.values(), Counter())
    print(dict(total))
    sys.exit(1 if total["DIFFERENT"] else 0)


if __name__ == "__main__":
    main()
