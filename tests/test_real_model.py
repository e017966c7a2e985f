"""The real small model with the shipped head: equality, seeds, streams, and memory that does not grow."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, TextIteratorStreamer

from conftest import SHIPPED_HEAD
from hf_specdec import SpeculativeGenerationMixin, bench
from hf_specdec.generation.loading import encode
from hf_specdec.verification.model import CACHE_FIELD

pytestmark = pytest.mark.slow

PROMPTS = [
    "Explain in two sentences why the sky is blue.",
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left?",
    "Repeat this list and add one: apple, pear, plum, apple, pear, plum.",
]
BLOCK_HEAD = SHIPPED_HEAD.parent / "smollm2-135m-instruct-dflash"
METHODS: list[Any] = ["eagle", {"method": "eagle", "tree": "static"}, "prompt_lookup"]


@pytest.mark.parametrize("prompt", [pytest.param(PROMPTS[0], marks=pytest.mark.slow), *PROMPTS[1:]])
def test_greedy_answers_are_equal(small_model: Any, small_tokenizer: Any, prompt: str) -> None:
    inputs = encode(small_tokenizer, prompt, small_model.device)
    plain = small_model.generate(**inputs, max_new_tokens=40, do_sample=False)
    for method in METHODS:
        assert torch.equal(
            plain, small_model.generate(**inputs, max_new_tokens=40, do_sample=False, speculative=method)
        )


@pytest.mark.slow
def test_the_shipped_head_is_worth_loading(small_model: Any, small_tokenizer: Any) -> None:
    inputs = encode(small_tokenizer, PROMPTS[1], small_model.device)
    small_model.generate(**inputs, max_new_tokens=60, do_sample=False, speculative="eagle")
    assert small_model.last_speculation.mean_accepted_length > 1.8


@pytest.mark.slow
def test_the_shipped_block_head_is_worth_loading(small_model: Any, small_tokenizer: Any) -> None:
    small_model.load_drafter(BLOCK_HEAD, name="block")
    try:
        for method in ("block", {"method": "block", "num_draft_tokens": 8, "num_steps": 3}):
            inputs = encode(small_tokenizer, PROMPTS[1], small_model.device)
            plain = small_model.generate(**inputs, max_new_tokens=60, do_sample=False)
            drafted = small_model.generate(**inputs, max_new_tokens=60, do_sample=False, speculative=method)
            assert torch.equal(plain, drafted)
            assert small_model.last_speculation.mean_accepted_length > 1.5
    finally:
        small_model.remove_drafter("block")


@pytest.mark.slow
def test_a_padded_batch_is_equal(small_model: Any, small_tokenizer: Any) -> None:
    rows = [encode(small_tokenizer, prompt, small_model.device)["input_ids"][0] for prompt in PROMPTS]
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=2) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    plain = small_model.generate(ids, **options)
    for method in ("eagle", "prompt_lookup"):
        assert torch.equal(plain, small_model.generate(ids, speculative=method, **options))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.9])
def test_the_same_seed_gives_the_same_tokens(small_model: Any, small_tokenizer: Any, temperature: float) -> None:
    inputs = encode(small_tokenizer, PROMPTS[0], small_model.device)
    options = {"max_new_tokens": 32, "do_sample": True, "temperature": temperature, "top_p": 0.9, "top_k": 50}
    for seed in range(2):
        torch.manual_seed(seed)
        plain = small_model.generate(**inputs, **options)
        for method in METHODS:
            torch.manual_seed(seed)
            assert torch.equal(plain, small_model.generate(**inputs, speculative=method, **options))


@pytest.mark.slow
def test_a_text_iterator_streams_from_a_thread(small_model: Any, small_tokenizer: Any) -> None:
    inputs = encode(small_tokenizer, PROMPTS[0], small_model.device)
    plain = small_model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    streamer = TextIteratorStreamer(small_tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120)
    options = {**inputs, "max_new_tokens": 24, "do_sample": False, "streamer": streamer, "speculative": "eagle"}
    thread = threading.Thread(target=small_model.generate, kwargs=options)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert len(pieces) > 3
    assert "".join(pieces) == small_tokenizer.decode(plain, skip_special_tokens=True)


@pytest.mark.slow
def test_a_chat_of_six_turns_on_one_cache(small_model: Any, small_tokenizer: Any) -> None:
    """Speculative and plain turns on the same cache, against plain generation that reads the whole chat anew."""
    cache, messages = DynamicCache(config=small_model.config), []
    for turn, method in enumerate(["eagle", None, "prompt_lookup", "eagle", "eagle", None]):
        messages.append(
            {"role": "user", "content": ["Name a colour.", "Another one, please.", "Which is darker?"][turn % 3]}
        )
        inputs = small_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        length = inputs["input_ids"].shape[1]
        options = {"max_new_tokens": 16, "do_sample": False}
        plain = small_model.generate(**inputs, **options)
        known = cache.get_seq_length()
        answer = small_model.generate(**inputs, **{CACHE_FIELD: cache}, speculative=method, **options)
        assert torch.equal(plain, answer), (turn, method)
        assert known < length < cache.get_seq_length() == answer.shape[1] - 1
        text = small_tokenizer.decode(answer[0, length:], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})


@pytest.mark.slow
def test_stop_strings_end_an_accepted_run(small_model: Any, small_tokenizer: Any) -> None:
    inputs = encode(small_tokenizer, PROMPTS[1], small_model.device)
    options = {"max_new_tokens": 60, "do_sample": False, "stop_strings": ["12", "box"], "tokenizer": small_tokenizer}
    plain = small_model.generate(**inputs, **options)
    assert plain.shape[1] - inputs["input_ids"].shape[1] < 60
    for method in METHODS:
        assert torch.equal(plain, small_model.generate(**inputs, speculative=method, **options))


@pytest.mark.slow
def test_half_precision_differs_only_at_near_ties(small_model_path: Any, small_tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model_path, dtype=torch.bfloat16)
    SpeculativeGenerationMixin.attach(model)
    questions = [bench.Question(str(i), "all", (prompt,)) for i, prompt in enumerate(PROMPTS)]
    for row in bench.measure(model, small_tokenizer, questions, ["prompt_lookup"], max_new_tokens=40):
        assert row.ids_equal or (row.top_two_gap is not None and row.top_two_gap <= 0.5), row
