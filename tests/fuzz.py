"""Differential fuzz: random combinations of what `generate()` takes, plain against speculative, in float32.

    python tests/fuzz.py --count 3000 [--seed 0]

Every case is a function of its number. A case ends *equal* (ids, scores, logits, hidden states, attentions, cache,
stream, and the state of the random generator), *refused* (`UnsupportedGenerationError`) or *invalid* (plain generate
raises, and so does the speculative call). Anything else is a silent difference, and fails.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.generation.streamers import BaseStreamer

import drafters
import zoo
from hf_specdec import (
    DrafterMismatchError,
    SpeculativeGenerationMixin,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.verification.model import CACHE_FIELD

MODELS = (
    "llama", "gemma3_text", "gpt2", "mistral", "gpt_neox", "llama4_text", "deepseek_v3", "gemma2", "gpt_oss",
    "qwen3_next", "qwen3_5_text", "kimi_linear", "lfm2", "mamba2", "falcon_h1", "jamba", "zamba",  # recurrent
    "bloom", "inkling_text", "gpt_neo",  # chains over transformers' own cache
)  # fmt: skip
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}


class Recorder(BaseStreamer):
    """What a streamer is given."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.received.append(value.tolist())

    def end(self) -> None:
        self.received.append("end")


class CountsCalls(LogitsProcessor):
    """A processor with a memory that couples rows: forbids a token by the number of its calls and all rows' ends."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, (int(input_ids[:, -1].sum()) + self.calls) % scores.shape[-1]] = -float("inf")
        return scores


class StopsRows(StoppingCriteria):
    """A criterion with a memory: row r ends after `first + 2 r` calls."""

    def __init__(self, first: int) -> None:
        self.calls, self.first = 0, first

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([self.calls >= self.first + 2 * row for row in range(input_ids.shape[0])])


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One printable character per id."""
    core = Tokenizer(models.BPE({chr(32 + i): i for i in range(zoo.VOCAB_SIZE)}, []))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=chr(32))


@functools.cache
def other_tokenizer() -> PreTrainedTokenizerFast:
    """Other ids for most of these characters; the rest is missing."""
    order = random.Random(0).sample(range(zoo.VOCAB_SIZE), zoo.VOCAB_SIZE - 16)
    core = Tokenizer(models.BPE({chr(32 + token): rank for rank, token in enumerate(order)}, []))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def foreign_assistant(model: Any, _answers: torch.Tensor, seed: int) -> DraftModelDrafter:
    """An assistant with another tokenizer."""
    assistant = drafters.assistant_for(model, seed)
    return DraftModelDrafter(assistant, tokenizer=tokenizer(), assistant_tokenizer=other_tokenizer())


BY_NAME = {**drafters.BY_NAME, "foreign": drafters.Row("foreign", "foreign", foreign_assistant, {"top_k": 2})}
DRAFTERS = (*BY_NAME, "foreign", "sometimes")
WINDOWED = ("eagle", "eagle_static", "eagle3", "peagle", "mtp", "dflash", "dspark", "dflash2", "lilicorr", "domino")
"""Drafters whose heads take `draft_window`."""


@functools.cache
def attached(name: str) -> Any:
    """A tiny model with random heads of every kind."""
    return with_heads(name)


def with_heads(name: str) -> Any:
    """The same, of one's own."""
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(name)))
    for row in BY_NAME.values():
        if not row.knows_answers:
            row.add(model)
    return model


@dataclass
class Case:
    """One combination. Options with a memory are made anew for each of the two calls."""

    model: str
    drafter: str
    ids: torch.Tensor
    mask: torch.Tensor | None
    speculative: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    fresh: dict[str, Callable[[], Any]] = field(default_factory=dict)
    seed: int = 0
    changed: Any = None  # the model to run, where it is not the tiny one as it was built

    @property
    def target(self) -> Any:
        """The model to run."""
        return attached(self.model) if self.changed is None else self.changed

    def __str__(self) -> str:
        shown = {name: value for name, value in self.options.items() if not isinstance(value, torch.Tensor)}
        padded = "" if self.mask is None else f" padded {(self.mask == 0).sum(-1).tolist()}"
        return (
            f"{self.model}/{self.drafter} {tuple(self.ids.shape)}{padded} {self.speculative} {shown} "
            f"{sorted({*self.fresh, *(k for k, v in self.options.items() if isinstance(v, torch.Tensor))})}"
        )


def case(number: int) -> Case:
    """The case of that number."""
    rng = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    batch, length = rng.choice([1, 1, 1, 2, 3, 4]), rng.choice([1, 2, 5, 9, 14, 21])
    ids = torch.randint(3, zoo.VOCAB_SIZE, (batch, length), generator=generator)
    if rng.random() < 0.3:  # repetitive, for lookup
        ids = ids[:, : max(1, length // 3)].repeat(1, 3)
        length = ids.shape[1]
    mask = None
    if length > 3 and rng.random() < 0.6:
        mask = torch.ones_like(ids)
        for row in range(batch):
            if rng.random() < 0.7:
                mask[row, : rng.randrange(length - 1)] = 0
            if rng.random() < 0.1:
                mask[row, rng.randrange(length - 1)] = 0
        ids = ids.masked_fill(mask == 0, 0)
    made = Case(rng.choice(MODELS), rng.choice(DRAFTERS), ids, mask, seed=number)
    if rng.random() < 0.5:
        made.speculative["num_draft_tokens"] = rng.choice([1, 2, 5, 8, 13])
    _lengths(made, rng)
    sampled = rng.random() < 0.4
    made.options["do_sample"] = sampled
    if sampled:
        _warpers(made, rng)
    for add in rng.sample(ADDITIONS, rng.choice([0, 1, 1, 2, 3])):
        add(made, rng)
    return made


def _lengths(made: Case, rng: random.Random) -> None:
    new = rng.choice([1, 2, 6, 12, 20])
    if rng.random() < 0.15:
        made.options["max_length"] = made.ids.shape[1] + new
    else:
        made.options["max_new_tokens"] = new
    if rng.random() < 0.5:
        made.options["eos_token_id"] = rng.sample(range(3, zoo.VOCAB_SIZE), rng.choice([1, 3, 12, 30]))
        made.options["pad_token_id"] = rng.choice([0, 0, 5])


def _warpers(made: Case, rng: random.Random) -> None:
    choices = {
        "temperature": [0.3, 0.9, 1.0, 1.7], "top_k": [0, 1, 5, 40], "top_p": [0.3, 0.9, 1.0], "min_p": [0.02, 0.2],
        "typical_p": [0.5, 0.9], "epsilon_cutoff": [1e-3], "eta_cutoff": [1e-3], "renormalize_logits": [True],
    }  # fmt: skip
    for name in rng.sample(sorted(choices), rng.choice([0, 1, 2, 3])):
        made.options[name] = rng.choice(choices[name])


def _simple(made: Case, rng: random.Random) -> None:
    choices: dict[str, list[Any]] = {
        "repetition_penalty": [0.8, 1.3], "no_repeat_ngram_size": [1, 2, 3], "min_new_tokens": [3, 11],
        "min_length": [12, 25], "bad_words_ids": [[[5], [7, 8]], [[9, 10, 11], [20]]], "suppress_tokens": [[10, 11]],
        "begin_suppress_tokens": [[12, 13, 14]], "forced_eos_token_id": [9, [4, 6]], "forced_bos_token_id": [7],
        "sequence_bias": [[[[5], 4.0], [[6, 7], -3.0]]], "exponential_decay_length_penalty": [(4, 1.5)],
        "remove_invalid_values": [True], "encoder_repetition_penalty": [1.4], "encoder_no_repeat_ngram_size": [2],
        "max_time": [1000.0], "token_healing": [False], "renormalize_logits": [True], "use_cache": [True],
        "top_h": [0.5], "low_memory": [False],
    }  # fmt: skip
    for name in rng.sample(sorted(choices), rng.choice([1, 1, 2, 3])):
        made.options[name] = rng.choice(choices[name])


def _refusable(made: Case, rng: random.Random) -> None:
    choices: dict[str, list[Any]] = {
        "num_beams": [2], "use_cache": [False], "penalty_alpha": [0.6], "prompt_lookup_num_tokens": [3],
        "cache_implementation": ["static", "dynamic", "offloaded"], "num_beam_groups": [2],
    }  # fmt: skip
    name = rng.choice(sorted(choices))
    made.options[name] = rng.choice(choices[name])


def _guidance(made: Case, rng: random.Random) -> None:
    made.options["guidance_scale"] = rng.choice([0.7, 1.5])
    if rng.random() < 0.5:
        made.options["negative_prompt_ids"] = made.ids.flip(-1)
        if made.mask is not None:
            made.options["negative_prompt_attention_mask"] = made.mask.flip(-1)


def _outputs(made: Case, rng: random.Random) -> None:
    made.options["return_dict_in_generate"] = True
    for name in ("output_scores", "output_logits", "output_hidden_states", "output_attentions"):
        if rng.random() < 0.4:
            made.options[name] = True


def _cache(made: Case, rng: random.Random) -> None:
    if CACHE_FIELD in made.fresh:
        return
    kind = rng.choice(["empty", "filled", "filled", "new tokens", "static"])
    ids, mask = made.ids, made.mask
    known = 0 if kind in ("empty", "static") else rng.randrange(1, max(2, ids.shape[1]))
    if known >= ids.shape[1]:
        known = 0

    def cache() -> Any:
        model = made.target
        if kind == "static":
            return StaticCache(config=model.config, max_cache_len=64)
        past = DynamicCache(config=model.config)
        if known:
            whole = torch.ones_like(ids) if mask is None else mask
            positions = (whole.cumsum(-1) - 1).clamp(min=0)
            with torch.no_grad():
                model(
                    input_ids=ids[:, :known],
                    attention_mask=whole[:, :known],
                    position_ids=positions[:, :known],
                    **{CACHE_FIELD: past},
                    use_cache=True,
                )
        return past

    made.fresh[CACHE_FIELD] = cache
    if kind == "new tokens" and known:
        made.mask = torch.ones_like(ids) if mask is None else mask
        made.ids = ids[:, known:]
        if "max_length" in made.options:
            made.options["max_length"] -= known


def _embeddings(made: Case, rng: random.Random) -> None:
    if CACHE_FIELD not in made.fresh and "encoder_repetition_penalty" not in made.options:
        made.fresh["inputs_embeds"] = lambda: made.target.get_input_embeddings()(made.ids).detach()
        if rng.random() < 0.7:
            made.options["drop_ids"] = True


def _constraint(made: Case, rng: random.Random) -> None:
    made.options["prefix_allowed_tokens_fn"] = lambda row, ids: [
        t for t in range(zoo.VOCAB_SIZE) if (t + len(ids) + row) % 3
    ]


def _chunks(made: Case, rng: random.Random) -> None:
    made.options["prefill_chunk_size"] = rng.choice([1, 3, 8])


def _positions(made: Case, rng: random.Random) -> None:
    if CACHE_FIELD not in made.fresh:
        made.options["position_ids"] = torch.arange(made.ids.shape[1])[None].expand(made.ids.shape) + rng.choice(
            [1, 3]
        )


def _processor(made: Case, rng: random.Random) -> None:
    made.fresh["logits_processor"] = lambda: LogitsProcessorList([CountsCalls()])


def _criterion(made: Case, rng: random.Random) -> None:
    first = rng.choice([1, 3, 7])
    made.fresh["stopping_criteria"] = lambda: StoppingCriteriaList([StopsRows(first)])


def _stop_strings(made: Case, rng: random.Random) -> None:
    made.options["stop_strings"] = [chr(32 + i) for i in rng.sample(range(3, zoo.VOCAB_SIZE), 12)] + ["abc", "x y"]
    made.options["tokenizer"] = tokenizer()


def _stream(made: Case, rng: random.Random) -> None:
    made.fresh["streamer"] = Recorder


def _watermark(made: Case, rng: random.Random) -> None:
    scheme = rng.choice(["lefthash", "selfhash"])
    made.options["watermarking_config"] = WatermarkingConfig(bias=3.0, seeding_scheme=scheme, context_width=1)


def _several(made: Case, rng: random.Random) -> None:
    if made.options["do_sample"]:
        made.options["num_return_sequences"] = rng.choice([2, 3])


def _history(made: Case, rng: random.Random) -> None:
    """Earlier answers are merged with what the drafter proposes; cases of one model share them."""
    row = BY_NAME[made.drafter]
    if row.fields or row.knows_answers:
        return
    method = row.method
    name = rng.choice([True, "somebody", "per_prompt"])
    made.speculative |= {"method": "auto", "methods": ["prompt_lookup", method][method == "prompt_lookup" :]}
    made.speculative |= {"history": name, "adaptive": rng.choice([None, False])}


def _window(made: Case, rng: random.Random) -> None:
    if made.drafter in WINDOWED:
        made.speculative["draft_window"] = rng.choice([1, 3, 8, 16])


def _ending_rows(made: Case, rng: random.Random) -> None:
    """Rows that end long before the others leave the batch."""
    made.options["max_new_tokens"] = 40
    made.options.pop("max_length", None)
    made.options["eos_token_id"] = rng.sample(range(3, zoo.VOCAB_SIZE), rng.choice([3, 6, 12]))
    made.options["pad_token_id"] = 0


ADDITIONS = [
    _history, _history, _ending_rows, _window, _window, _simple, _simple,
    _refusable, _guidance, _outputs, _outputs, _cache, _cache, _embeddings, _constraint, _chunks,
    _positions, _processor, _criterion, _stop_strings, _stream, _watermark, _several,
]  # fmt: skip


# ------------------------------------------------------------------------------------------------- running a case


def run(made: Case, speculative: Any) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """One call: its output, the options made for it, and the generator's state after it."""
    fresh = {name: make() for name, make in made.fresh.items()}
    options = {**made.options, **fresh}
    if made.mask is not None:
        options["attention_mask"] = made.mask
    if not options.pop("drop_ids", False):
        options["input_ids"] = made.ids
    torch.manual_seed(made.seed)
    output = made.target.generate(**options, speculative=speculative)
    return output, fresh, torch.get_rng_state()


def check(made: Case) -> str:
    """Compare the two calls.

    Returns:
        "equal", "sampled" (a ragged batch: same kind of output, other draws), "refused" or "invalid".

    Raises:
        AssertionError: They differ.
    """
    model = made.target
    try:
        plain, plain_fresh, plain_state = run(made, None)
    except Exception as error:
        try:
            run(made, {"method": "prompt_lookup", **made.speculative})
        except Exception:
            return "invalid"
        if "block_sequence_ids" in str(error):
            return "invalid"  # transformers 5.17's llama4 with a static cache
        raise AssertionError(f"plain generate raises {error!r}, the speculative call does not") from error
    row = BY_NAME[made.drafter]
    sequences = plain if isinstance(plain, torch.Tensor) else plain.sequences
    prompt = 0 if made.options.get("drop_ids") else made.ids.shape[1]
    config = {**row.add(model, sequences[:, prompt:], made.seed), **made.speculative}
    if "tree" in config:  # its size is its own
        config.pop("num_draft_tokens", None)
    try:
        ours, ours_fresh, our_state = run(made, config)
    except (UnsupportedGenerationError, UnsupportedModelError, DrafterMismatchError):
        return "refused"
    if not _comparable(made):
        assert type(plain) is type(ours) or isinstance(ours, type(plain))
        return "sampled"
    compare(plain, ours, made.mask)
    assert torch.equal(plain_state, our_state), "the random generator was used differently"
    if "streamer" in made.fresh:
        assert plain_fresh["streamer"].received == ours_fresh["streamer"].received, "streams differ"
    if CACHE_FIELD in made.fresh:
        compare_caches(plain_fresh[CACHE_FIELD], ours_fresh[CACHE_FIELD], made.mask)
    return "equal"


def _comparable(made: Case) -> bool:
    """Whether plain generate draws in the same order: one row, or rows in lockstep."""
    rows = made.ids.shape[0] * made.options.get("num_return_sequences", 1)
    if rows == 1 or not made.options["do_sample"]:
        return True
    outputs = made.options.get("output_scores") or made.options.get("output_hidden_states")
    return bool({"logits_processor", "stopping_criteria"} & set(made.fresh) or outputs)


def compare(plain: Any, ours: Any, mask: torch.Tensor | None = None, tolerance: dict[str, Any] = TOLERANCE) -> None:
    """Every part of the two outputs."""
    if isinstance(plain, torch.Tensor):
        assert isinstance(ours, torch.Tensor)
        assert plain.tolist() == ours.tolist(), f"ids differ:\n{plain.tolist()}\n{ours.tolist()}"
        return
    assert plain.sequences.tolist() == ours.sequences.tolist(), (
        f"ids differ:\n{plain.sequences.tolist()}\n{ours.sequences.tolist()}"
    )
    for name in ("scores", "logits", "hidden_states", "attentions"):
        wanted, got = _flat(getattr(plain, name)), _flat(getattr(ours, name))
        assert len(wanted) == len(got), f"{name}: {len(wanted)} tensors, got {len(got)}"
        for index, (left, right) in enumerate(zip(wanted, got, strict=True)):
            assert left.shape == right.shape, f"{name}[{index}]: {tuple(left.shape)}, got {tuple(right.shape)}"
            torch.testing.assert_close(right, left, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    compare_caches(plain[CACHE_FIELD], ours[CACHE_FIELD], mask, tolerance)


def compare_caches(plain: Any, ours: Any, mask: torch.Tensor | None, tolerance: dict[str, Any] = TOLERANCE) -> None:
    """Type, length and content; what stands in the slots of padding is seen by nobody."""
    if plain is None or ours is None:
        assert plain is ours
        return
    assert type(plain) is type(ours)
    length = 0  # caches of states alone do not count tokens
    if any(isinstance(layer, CacheLayerMixin) for layer in plain.layers):
        length = int(plain.get_seq_length())
        assert length == int(ours.get_seq_length()), "caches differ in length"
    for left, right in zip(plain.layers, ours.layers, strict=True):
        if getattr(left, "is_initialized", False):
            rows = left.keys.shape[0]
            seen = torch.ones(rows, length, dtype=torch.bool)
            if mask is not None:
                seen[:, : mask.shape[1]] = mask.repeat_interleave(rows // mask.shape[0], dim=0)[:, :length] != 0
            for name in ("keys", "values"):
                wanted, got = getattr(left, name), getattr(right, name)
                shown = seen[:, None, length - wanted.shape[2] :, None] if wanted.shape[2] <= length else 1
                torch.testing.assert_close(got * shown, wanted * shown, **tolerance)
        for name in ("conv_states", "recurrent_states"):
            for wanted, got in zip(_flat([*getattr(left, name, {}).values()]),
                                   _flat([*getattr(right, name, {}).values()]), strict=True):  # fmt: skip
                torch.testing.assert_close(got, wanted, **tolerance)


def _flat(values: Any) -> list[torch.Tensor]:
    if values is None:
        return []
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in _flat(value)]


def main() -> None:
    """Run many cases; the exit status is 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    for number in range(arguments.seed, arguments.seed + arguments.count):
        made = case(number)
        try:
            outcomes[check(made)] += 1
        except Exception as error:
            outcomes["DIFFERENT"] += 1
            print(f"case {number}: {made}\n  {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-4)
    print(dict(outcomes))
    sys.exit(1 if outcomes["DIFFERENT"] else 0)


if __name__ == "__main__":
    main()
