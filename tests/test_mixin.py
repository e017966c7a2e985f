"""Attach and detach, the options of generate(), outputs, streams, interruptions, threads."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import threading
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

import zoo
from drafters import random_head
from hf_specdec import (
    CacheCapacityError,
    DrafterMismatchError,
    InvalidConfigError,
    SpeculationStats,
    SpeculativeConfig,
    SpeculativeGenerationMixin,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from hf_specdec.cpu import library
from hf_specdec.drafters.base import Needs
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.generation.call import Request
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.model import CACHE_FIELD
from reference import OracleDrafter
from zoo import GREEDY, IDS

HALF_CACHE = DynamicCache()
HALF_CACHE.offloading = True


def with_oracle(model: Any, pattern: str = "sometimes", ids: torch.Tensor = IDS, **options: Any) -> torch.Tensor:
    """Register a drafter that knows the plain greedy answer, and return that answer."""
    plain = model.generate(ids, **{**GREEDY, "attention_mask": torch.ones_like(ids), **options})
    model.add_drafter(OracleDrafter(plain[:, ids.shape[1] :], pattern, zoo.VOCAB_SIZE))
    return plain


# ------------------------------------------------------------------------------------------------- attach, detach


def test_attach_returns_the_same_object_of_both_classes() -> None:
    model = zoo.build("qwen2")
    plain_class, keys = type(model), set(model.__dict__)
    config, state = model.generation_config.to_dict(), list(model.state_dict())
    attached = SpeculativeGenerationMixin.attach(model)
    assert attached is model
    assert SpeculativeGenerationMixin.attach(model) is model
    assert isinstance(model, plain_class)
    assert isinstance(model, SpeculativeGenerationMixin)
    assert type(model).__name__ == plain_class.__name__
    assert type(model).__module__ == plain_class.__module__
    assert model.generation_config.to_dict() == config
    assert list(model.state_dict()) == state
    assert SpeculativeGenerationMixin.detach(model) is model
    assert type(model) is plain_class
    assert set(model.__dict__) == keys
    assert not model._forward_hooks


def test_attached_models_save_reload_copy_and_pickle(tmp_path: Path) -> None:
    # a model of its own: transformers leaves hooks on one that was ever asked for hidden states; they do not pickle
    llama: Any = SpeculativeGenerationMixin.attach(zoo.build.__wrapped__("llama"))
    plain = with_oracle(llama)
    llama.save_pretrained(tmp_path)
    assert not any("specul" in path.read_text() for path in tmp_path.glob("*.json"))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(reloaded) is LlamaForCausalLM
    assert torch.equal(plain, reloaded.generate(IDS, **GREEDY))
    for twin in (copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))):
        assert type(twin) is type(llama)
        assert torch.equal(plain, twin.generate(IDS, speculative="oracle", **GREEDY))
        assert twin.drafters["oracle"] is not llama.drafters["oracle"]


def test_the_mixin_is_a_base_class_too(tmp_path: Path) -> None:
    class SpeculativeLlama(SpeculativeGenerationMixin, LlamaForCausalLM):
        pass

    zoo.build("llama").save_pretrained(tmp_path)
    model: Any = SpeculativeLlama.from_pretrained(tmp_path)
    plain = with_oracle(model, eos_token_id=None)
    assert torch.equal(plain, model.generate(IDS, speculative="oracle", eos_token_id=None, **GREEDY))
    with pytest.raises(UnsupportedModelError, match="base class of SpeculativeLlama"):
        SpeculativeGenerationMixin.detach(model)

    class Derived(SpeculativeLlama):
        pass

    with pytest.raises(UnsupportedModelError, match="base class of Derived"):
        SpeculativeGenerationMixin.detach(Derived.from_pretrained(tmp_path))


def test_training_mode_survives_the_probe() -> None:
    model = copy.deepcopy(zoo.build("llama")).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    SpeculativeGenerationMixin.attach(model)
    assert [module.training for module in model.modules()] == modes


def test_encoder_decoders_and_strangers_are_refused() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        SpeculativeGenerationMixin.attach(t5)
    with pytest.raises(UnsupportedModelError, match="not a transformers model"):
        SpeculativeGenerationMixin.attach(torch.nn.Linear(2, 2))


def test_generate_is_documented(llama: Any) -> None:
    """`help(model.generate)`: types, values, errors and an example of `speculative`, with transformers' parameters.

    transformers' own text would contradict it: it describes arguments and results that are refused.
    """
    parameters = inspect.signature(llama.generate).parameters
    plain = inspect.signature(GenerationMixin.generate).parameters
    assert [*parameters] == [*[name for name in plain if name not in ("self", "kwargs")], "speculative", "kwargs"]
    assert parameters["speculative"].kind is inspect.Parameter.KEYWORD_ONLY
    assert repr(parameters["speculative"].default) == "<generation_config.speculative>"
    text = inspect.getdoc(llama.generate) or ""
    assert "<Tip" not in text
    assert "exact same tokenizer" not in text
    for part in ('"prompt_lookup"', "`SpeculativeConfig`", "Returns:", "Raises:", "UnsupportedGenerationError",
                 "Example:", 'speculative="auto"', "these are refused", "`custom_generate`"):  # fmt: skip
        assert part in text, part


# ------------------------------------------------------------------------------------------------- how to ask for it


@pytest.mark.parametrize(
    "speculative",
    ["oracle", {"method": "oracle"}, SpeculativeConfig("oracle"), SpeculativeConfig("oracle", num_draft_tokens=3)],
)
def test_every_form_of_the_argument(llama: Any, speculative: Any) -> None:
    plain = with_oracle(llama)
    assert torch.equal(plain, llama.generate(IDS, speculative=speculative, **GREEDY))
    assert llama.last_speculation.method == "oracle"


def test_generation_configs_carry_it(llama: Any) -> None:
    plain = with_oracle(llama)
    config = GenerationConfig(max_new_tokens=16, do_sample=False, pad_token_id=0, speculative="oracle")
    assert torch.equal(plain, llama.generate(IDS, generation_config=config))
    assert llama.last_speculation.num_generated_tokens == 16
    llama.generation_config.speculative = {"method": "prompt_lookup"}
    try:
        assert torch.equal(plain, llama.generate(IDS, **GREEDY))
        assert llama.last_speculation.method == "prompt_lookup"
        assert torch.equal(plain, llama.generate(IDS, speculative=None, **GREEDY))
    finally:
        del llama.generation_config.speculative


def test_auto_takes_what_there_is(llama: Any) -> None:
    llama.generate(IDS, speculative="auto", **GREEDY)
    assert llama.last_speculation.method == "hybrid"
    assert llama.last_speculation.control["free_sources"] == ["prompt_lookup", "token_recycling"]
    llama.generate(IDS, speculative="ngram", **GREEDY)
    assert llama.last_speculation.method == "prompt_lookup"


def test_drafters_are_added_and_removed_by_name(llama: Any) -> None:
    oracle = OracleDrafter(IDS, "always", zoo.VOCAB_SIZE)
    assert llama.add_drafter(oracle, "mine") is oracle
    assert llama.drafters == {"mine": oracle}
    llama.generate(IDS, speculative="oracle", **GREEDY)  # by its method as well as by its name
    assert llama.last_speculation.method == "oracle"
    assert llama.remove_drafter("mine") is oracle
    with pytest.raises(DrafterMismatchError, match="no drafter 'mine'"):
        llama.remove_drafter("mine")
    with pytest.raises(DrafterMismatchError, match="got str"):
        llama.add_drafter("eagle")


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"speculative": "eagel"}, InvalidConfigError, "Unknown method or drafter 'eagel'"),
        ({"speculative": "eagle"}, DrafterMismatchError, "needs a head"),
        ({"speculative": "draft_model"}, DrafterMismatchError, "assistant_model="),
        ({"speculative": "eagle", "assistant_model": object()}, UnsupportedGenerationError, "has no effect with"),
        ({"speculative": "medusa"}, DrafterMismatchError, "needs a head"),
        ({"speculative": {"num_drafts": 3}}, InvalidConfigError, "Did you mean 'num_draft_tokens'"),
        ({"speculative": {"num_draft_tokens": 0}}, InvalidConfigError, "an integer from 1"),
        ({"speculative": {"tree": [(0, 1)]}}, InvalidConfigError, "no parent"),
        ({"speculative": 7}, InvalidConfigError, "got 7"),
        ({"speculative": "prompt_lookup", "num_beams": 2}, UnsupportedGenerationError, "beam search. .*num_beams=2"),
        ({"speculative": "prompt_lookup", "num_beams": 2, "do_sample": True}, UnsupportedGenerationError, "beam"),
        ({"speculative": "prompt_lookup", "prompt_lookup_num_tokens": 3}, UnsupportedGenerationError, "tokens=3"),
        ({"speculative": "prompt_lookup", "use_mtp": True}, UnsupportedGenerationError, "or use_mtp=True"),
        ({"speculative": "prompt_lookup", "use_cache": False}, UnsupportedGenerationError, "use_cache"),
        ({"speculative": "prompt_lookup", CACHE_FIELD: HALF_CACHE}, UnsupportedGenerationError, "offloaded"),
        ({"speculative": "prompt_lookup", "cache_implementation": "offloaded"}, UnsupportedGenerationError, "offload"),
        ({"speculative": "prompt_lookup", "custom_generate": print}, UnsupportedGenerationError, "loop"),
        ({"speculative": {"method": "prompt_lookup", "compile": "cuda_graph"}}, UnsupportedGenerationError, "compile"),
        ({"speculative": {"method": "prompt_lookup", "acceptance": "typical"}, "guidance_scale": 1.5},
         UnsupportedGenerationError, "UnbatchedClassifierFree"),
        ({"speculative": {"method": "prompt_lookup", "acceptance": "block"}, "do_sample": True},
         UnsupportedGenerationError, "'prompt_lookup' does not sample its drafts"),
        ({"speculative": {"method": "prompt_lookup", "acceptance": "block"}}, UnsupportedGenerationError, "do_sam"),
        ({"speculative": {"method": "prompt_lookup", "acceptance": "greedy"}, "do_sample": True},
         UnsupportedGenerationError, "acceptance='greedy' cannot be combined with do_sample=True"),
        ({"speculative": {"method": "prompt_lookup", "acceptance": "rejection"}}, UnsupportedGenerationError, "do_s"),
        ({"speculative": {"method": "prompt_lookup", "max_cache_length": 30}}, CacheCapacityError, "need 68"),
        ({"speculative": "prompt_lookup", "token_type_ids": torch.zeros_like(IDS)}, ValueError, "token_type_ids"),
        ({"stored": "prompt_lookup", "custom_generate": print}, UnsupportedGenerationError, "custom_generate"),
        # a stored default does not say which of the two kinds of assisted generation is meant
        ({"stored": "draft_model", "assistant_model": zoo.build("llama")}, UnsupportedGenerationError, "assisted"),
        ({"speculative": "prompt_lookup", "assistant_model": zoo.build("llama")}, UnsupportedGenerationError, "no e"),
        ({"speculative": "prompt_lookup", "inputs": IDS[:, :0], "attention_mask": IDS[:, :0]},
         UnsupportedGenerationError, "prompt is empty"),
        ({"speculative": "prompt_lookup", "inputs": "hello"}, UnsupportedGenerationError, "got a str. Call"),
        ({"speculative": "prompt_lookup", "inputs": [[1, 2]]}, UnsupportedGenerationError, "got a list"),
        ({"speculative": "prompt_lookup", "inputs": {"input_ids": IDS}}, UnsupportedGenerationError, "got a dict"),
    ],
)  # fmt: skip
def test_bad_input_gets_a_clear_error_and_changes_nothing(
    llama: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    plain, keys = llama.generate(IDS, **GREEDY), set(llama.__dict__)
    arguments = {"inputs": IDS, **GREEDY, **options}
    llama.generation_config.speculative = arguments.pop("stored", None)
    try:
        with pytest.raises(error, match=message):
            llama.generate(**arguments)
    finally:
        del llama.generation_config.speculative
    assert set(llama.__dict__) == keys
    assert not llama.model._forward_hooks
    assert torch.equal(plain, llama.generate(IDS, **GREEDY))
    assert torch.equal(plain, llama.generate(IDS, speculative="prompt_lookup", **GREEDY))


def test_a_request_may_pass_through_twice(llama: Any) -> None:
    """A wrapper's `generate()` may hand its arguments to that of the model inside, which is attached as well."""
    assert torch.equal(
        llama.generate(IDS, **GREEDY), llama.generate(IDS, speculative=Request("prompt_lookup"), **GREEDY)
    )
    assert llama.last_speculation.method == "prompt_lookup"


def test_ranks_in_step_need_a_cache_that_can_be_cut(attach: Any) -> None:
    model = attach("inkling_text")
    with pytest.raises(UnsupportedGenerationError, match="recurrent state"):
        model.generate(IDS, speculative="prompt_lookup", synced_gpus=True, **GREEDY)


# ------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": list(range(3, 40))},
        {"bad_words_ids": [[5], [7, 8]], "suppress_tokens": [10, 11]},
        {"forced_eos_token_id": 9},
        {"max_length": 30, "max_new_tokens": None},
        {"guidance_scale": 1.5},
        {"prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(96) if (t + len(ids)) % 3]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_see_the_exact_prefix(llama: Any, options: dict[str, Any]) -> None:
    plain = with_oracle(llama, **options)
    speculative = llama.generate(IDS, speculative="oracle", **{**GREEDY, **options})
    assert torch.equal(plain, speculative)
    assert llama.last_speculation.mean_accepted_length > 1


class StopsAfter(StoppingCriteria):
    """Ends after a number of calls: one call per token, or the ids differ."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left <= 0)


def test_custom_criteria_are_asked_once_per_token(llama: Any) -> None:
    with_oracle(llama, "always")
    for calls in (1, 5, 9):
        answers = [
            llama.generate(IDS, stopping_criteria=StoppingCriteriaList([StopsAfter(calls)]), speculative=s, **GREEDY)
            for s in (None, "oracle")
        ]
        assert torch.equal(*answers)
        assert answers[0].shape[1] == 20 + calls


# ------------------------------------------------------------------------------------------------- what comes back


def test_the_output_object_has_transformers_fields(llama: Any) -> None:
    with_oracle(llama)
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
               "repetition_penalty": 1.2}  # fmt: skip
    plain, speculative = llama.generate(IDS, **options), llama.generate(IDS, speculative="oracle", **options)
    assert isinstance(speculative, type(plain))
    assert torch.equal(plain.sequences, speculative.sequences)
    for name in ("scores", "logits"):
        assert len(getattr(speculative, name)) == 16
        torch.testing.assert_close(torch.cat(getattr(speculative, name)), torch.cat(getattr(plain, name)))
    assert isinstance(speculative.speculation, SpeculationStats)
    assert speculative.speculation is llama.last_speculation


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_cache_is_continued_and_written_back(name: str, batch_size: int, attach: Any) -> None:
    """Six turns on one cache, plain and speculative ones, of rows that end at different places."""
    model = attach(name)
    cache, generator = DynamicCache(config=model.config), torch.Generator().manual_seed(1)
    text = torch.randint(3, zoo.VOCAB_SIZE, (batch_size, 5), generator=generator)
    for method in ("oracle", None, "prompt_lookup", "oracle", "oracle", None):
        options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": [7, 8, 9, 10, 11], "pad_token_id": 0,
                   "attention_mask": torch.ones_like(text)}  # fmt: skip
        plain = model.generate(text, **options)
        model.add_drafter(OracleDrafter(plain[:, text.shape[1] :], "sometimes", zoo.VOCAB_SIZE))
        answer = model.generate(text, **{CACHE_FIELD: cache}, speculative=method, **options)
        assert torch.equal(plain, answer), method
        assert cache.get_seq_length() == answer.shape[1] - 1
        more = torch.randint(3, zoo.VOCAB_SIZE, (batch_size, 3), generator=generator)
        text = torch.cat([answer, more], dim=-1)


def test_a_failed_generation_leaves_a_handed_in_cache_alone(llama: Any) -> None:
    cache = DynamicCache(config=llama.config)
    first = llama.generate(IDS, **{CACHE_FIELD: cache}, speculative="prompt_lookup", **GREEDY)
    more, known = torch.cat([first, IDS], dim=-1), cache.get_seq_length()
    options = {**GREEDY, "attention_mask": torch.ones_like(more), "logits_processor": LogitsProcessorList([Raises()])}
    with pytest.raises(RuntimeError, match="processor"):
        llama.generate(more, **{CACHE_FIELD: cache}, speculative="prompt_lookup", **options)
    assert cache.get_seq_length() == known
    with pytest.raises(UnsupportedGenerationError, match="has 1 rows, the prompt has 2"):
        llama.generate(more.expand(2, -1), **{CACHE_FIELD: cache}, speculative="prompt_lookup", max_new_tokens=3)
    small = StaticCache(config=llama.config, max_cache_len=30)
    with pytest.raises(CacheCapacityError, match="has 30 slots"):
        llama.generate(IDS, **{CACHE_FIELD: small}, speculative="prompt_lookup", **GREEDY)


def test_guidance_runs_the_model_without_disturbing_features(llama: Any) -> None:
    """The guidance processor's forwards pass the same hook that keeps features for an EAGLE head."""
    llama.add_drafter(EagleDrafter(random_head(llama)))
    options = {**GREEDY, "guidance_scale": 1.5, "negative_prompt_ids": IDS.flip(-1)}
    assert torch.equal(llama.generate(IDS, **options), llama.generate(IDS, speculative="eagle", **options))


class Recorder(BaseStreamer):
    def __init__(self, fail_after: int | None = None) -> None:
        self.received: list[list[int]] = []
        self.ended, self.fail_after = 0, fail_after

    def put(self, value: torch.Tensor) -> None:
        if self.fail_after is not None and len(self.received) == self.fail_after:
            raise KeyboardInterrupt
        self.received.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_streamers_get_what_plain_gives_them(llama: Any, batch_size: int) -> None:
    ids = torch.cat([IDS, IDS.flip(-1), IDS + 1])[:batch_size]
    plain = with_oracle(llama, ids=ids)
    eos = [int(plain[0, 25]), int(plain[-1, 30])]
    options = {**GREEDY, "attention_mask": torch.ones_like(ids), "eos_token_id": eos}
    streams = [Recorder(), Recorder()]
    for stream, speculative in zip(streams, (None, "oracle"), strict=True):
        llama.generate(ids, streamer=stream, speculative=speculative, **options)
    assert streams[0].received == streams[1].received
    assert streams[1].ended == 1


class StepRecorder(Recorder):
    """Also notes how many tokens had come when each step ended."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def end_step(self) -> None:
        self.counts.append(sum(map(len, self.received)))


def test_streamers_hear_where_steps_end(llama: Any) -> None:
    with_oracle(llama)
    stream = StepRecorder()
    llama.generate(IDS, streamer=stream, speculative="oracle", **GREEDY)
    prompt, first = IDS.numel(), 1
    steps = llama.last_speculation.accepted_per_step[0]
    assert stream.counts == list(accumulate(steps, initial=prompt + first))
    assert max(steps) > 1
    plain = StepRecorder()
    llama.generate(IDS, streamer=plain, **GREEDY)
    assert plain.counts == []  # transformers' own loop: every token is a step


class Raises(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 24:
            raise RuntimeError("processor")
        return scores


class RaisesToo(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] > 24:
            raise RuntimeError("criterion")
        return torch.full((input_ids.shape[0],), False)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (KeyboardInterrupt, lambda: {"streamer": Recorder(fail_after=5)}),
        (RuntimeError, lambda: {"logits_processor": LogitsProcessorList([Raises()])}),
        (RuntimeError, lambda: {"stopping_criteria": StoppingCriteriaList([RaisesToo()])}),
    ],
)
def test_an_interrupted_generation_leaves_the_model_usable_and_plain(llama: Any, error: Any, options: Any) -> None:
    plain = with_oracle(llama)
    llama.drafters["oracle"].needs = Needs(feature_layers=(-1,))
    with pytest.raises(error):
        llama.generate(IDS, speculative="oracle", **options(), **GREEDY)
    assert not llama.model._forward_hooks
    assert torch.equal(plain, llama.generate(IDS, **GREEDY))
    assert torch.equal(plain, llama.generate(IDS, speculative="oracle", **GREEDY))


def test_two_threads_generate_at_once(llama: Any) -> None:
    prompts = [IDS, IDS.flip(-1)]
    answers = [llama.generate(ids, **{**GREEDY, "max_new_tokens": 40}) for ids in prompts]
    for row, answer in enumerate(answers):
        llama.add_drafter(OracleDrafter(answer[:, 20:], "sometimes", zoo.VOCAB_SIZE), f"oracle{row}")
        llama.drafters[f"oracle{row}"].needs = Needs(feature_layers=(-1,))
    results: dict[int, torch.Tensor] = {}

    def work(row: int) -> None:
        for _ in range(5):
            results[row] = llama.generate(prompts[row], speculative=f"oracle{row}", **{**GREEDY, "max_new_tokens": 40})

    threads = [threading.Thread(target=work, args=(row,)) for row in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row, answer in enumerate(answers):
        assert torch.equal(results[row], answer)


@pytest.mark.slow
def test_a_call_leaves_no_cache_behind(llama: Any) -> None:
    """Without the garbage collector's help: a cycle would keep whole caches alive until it runs."""
    with_oracle(llama)
    llama.drafters["oracle"].needs = Needs(feature_layers=(-1,))
    gc.collect()
    gc.disable()
    try:
        for options in (GREEDY, {**GREEDY, "return_dict_in_generate": True}):
            llama.generate(IDS, speculative="oracle", **options)
        assert not [thing for thing in gc.get_objects() if type(thing) is TreeCache]
    finally:
        gc.enable()


class ThreadCount(BaseStreamer):
    """The number of this process's threads at every `put`."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: Any) -> None:
        self.seen.append(len(os.listdir("/proc/self/task")))

    def end(self) -> None: ...


@pytest.mark.skipif(not library._gnu_openmp(False), reason="GNU's OpenMP runtime is not in this process")
@pytest.mark.parametrize("speculative", [None, "prompt_lookup"])
def test_a_call_ends_the_threads_that_it_started(speculative: str | None) -> None:
    """Those that wait for another thread of Python would halve this one's speed."""
    model, threads = copy.deepcopy(zoo.build("llama")), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        library.release_threads()
        before, counted = len(os.listdir("/proc/self/task")), ThreadCount()
        SpeculativeGenerationMixin.attach(model)
        ends = [len(os.listdir("/proc/self/task"))]
        model.generate(IDS.repeat(8, 8), max_new_tokens=8, speculative=speculative, streamer=counted)
        ends.append(len(os.listdir("/proc/self/task")))
        model.warmup("prompt_lookup")
        ends.append(len(os.listdir("/proc/self/task")))
        torch.ones(10**6).exp_()  # such as the conversion of a large head
        model.load_drafter(random_head(model), verify=None)
        ends.append(len(os.listdir("/proc/self/task")))
    finally:
        torch.set_num_threads(threads)
    assert max(counted.seen) >= before + 3
    assert ends == [before] * 4


def test_statistics_add_up(llama: Any) -> None:
    ids = torch.cat([IDS, IDS.flip(-1)])
    plain = with_oracle(llama, ids=ids)
    llama.generate(ids, speculative="oracle", **{**GREEDY, "attention_mask": torch.ones_like(ids)})
    stats = llama.last_speculation
    assert stats.num_generated_tokens == 2 * (plain.shape[1] - 20)
    assert [1 + sum(row) for row in stats.accepted_per_step] == [16, 16]
    assert max(map(len, stats.accepted_per_step)) == stats.num_target_forwards
    steps = sum(map(len, stats.accepted_per_step))
    assert stats.mean_accepted_length == pytest.approx(30 / steps)
    assert sum(stats.acceptance_by_depth) == pytest.approx(stats.mean_accepted_length - 1)
    assert stats.tau == stats.mean_accepted_length
    stages = stats.draft_seconds + stats.verify_seconds + stats.accept_seconds + stats.prefill_seconds
    assert 0 < stages < stats.total_seconds
    assert stats.to_dict()["tokens_per_second"] == stats.tokens_per_second
    assert "tau" in repr(stats)
    assert "..." not in repr(stats)
    stats.accepted_per_step = [[51]]
    assert "depth " + "1.00 " * 6 + "..." in repr(stats)
    assert "<table>" in stats._repr_html_()
