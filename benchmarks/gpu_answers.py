"""The next nine minutes: real text with SmolLM2-135M, and with an 8B that writes the same text.

    python benchmarks/gpu_answers.py --json answers.jsonl
    python benchmarks/gpu_answers.py --tiny --json rehearsal.jsonl

* `small` and `wide`: six unseen questions, 128 new tokens. All methods answer every question in turn: once cold, with
  the captures that it took, then three times after `warmup()`. `wide` is SmolLM2 widened to an 8B, with its head, see
  `Kit.widened`. Both parts end with a profile of a step of `eagle`.
* `mends`: the same questions, cold, by `auto` alone: as it is; with the prices of runs that are no replays; and with
  captures that empty torch's memory caches.
* `float32`: answers of SmolLM2 in float32 compared with plain ones, with TF32 and without.

Methods: plain `generate()`; transformers' compiled static cache, alone and (from 5.24 on) with its prompt lookup; this
package's captured forward without drafts; `eagle`; `auto`; and `eagle` with forwards compiled by inductor.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import transformers
from gpu_kit import Kit, main
from packaging.version import Version
from torch.autograd import DeviceType

from hf_specdec.bench.methods import COMPILED, call_options
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.verification import graphs

QUESTIONS, NEW_TOKENS, ROUNDS, LONGEST_PROMPT = 6, 128, 3, 512
BASELINES = ("plain", "static")
CALLS = (
    "cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaStreamSynchronize",
    "cudaEventSynchronize", "cudaDeviceSynchronize",
)  # fmt: skip
"""Calls of the driver that a profile counts; kernels have further ones with these beginnings."""
SLOWEST = 25
"""Operations of the device that a profile lists, those with the largest sum of times."""


def methods(model: Any, count: int) -> dict[str, dict[str, Any]]:
    """Return arguments of `generate()` by method."""
    static = call_options(COMPILED, None, model, LONGEST_PROMPT + count)
    lookup = {**static, "prompt_lookup_num_tokens": 10}
    compiles_lookup = Version(transformers.__version__) >= Version("5.24")
    ours = {
        "captured": {"method": "prompt_lookup", "num_draft_tokens": 1, "compile": "cuda_graph"},
        "eagle": {"method": "eagle", "compile": "cuda_graph"}, "auto": {"method": "auto", "compile": "cuda_graph"},
        "eagle+inductor": {"method": "eagle", "compile": "inductor"},
    }  # fmt: skip
    return {
        "plain": {}, "static": static, **({"static+lookup": lookup} if compiles_lookup else {}),
        **{name: {"speculative": settings} for name, settings in ours.items()},
    }  # fmt: skip


def answer(kit: Kit, model: Any, inputs: Any, count: int, how: dict[str, Any]) -> tuple[float, list[int]]:
    """Return the seconds of a greedy answer, and its tokens."""
    found: list[Any] = []
    seconds = kit.seconds_of(
        lambda: found.append(model.generate(**inputs, max_new_tokens=count, do_sample=False, **how))
    )
    return seconds, found[0][0, inputs["input_ids"].shape[1] :].tolist()


def timed(kit: Kit, model: Any, head: Any) -> None:
    """Answer the questions by all methods, cold and in rounds, and compare their medians."""
    model.add_drafter(EagleDrafter(head), "eagle")
    count = 12 if kit.tiny else NEW_TOKENS
    prompts, ways = kit.prompts(2 if kit.tiny else QUESTIONS), methods(model, count)
    speeds: dict[tuple[str, str], list[float]] = {}
    plain: dict[str, list[int]] = {}
    for number in range(-1, 1 if kit.tiny else ROUNDS):
        for question, inputs in prompts.items():
            for name, how in ways.items():
                if not kit.has_time:
                    break
                before = len(kit.captures)
                seconds, ids = answer(kit, model, inputs, count, how)
                plain.setdefault(question, ids)
                stats = model.last_speculation if "speculative" in how else None
                ours = {} if stats is None else {
                    "tau": stats.mean_accepted_length, "forwards": stats.forwards,
                    "steps": stats.num_target_forwards, "stages": stats.stage_seconds,
                }  # fmt: skip
                kit.row(
                    question=question, method=name, round=number, tokens=len(ids), call_seconds=seconds,
                    equal=ids == plain[question], capture_seconds=kit.captures[before:], **ours,
                )  # fmt: skip
                if number >= 0:
                    speeds.setdefault((name, question), []).append(len(ids) / seconds)
        if number < 0:
            for name, how in ways.items():
                if "speculative" in how:
                    begin, before = time.perf_counter(), len(kit.captures)
                    model.warmup(how["speculative"], prompt_length=LONGEST_PROMPT // (16 if kit.tiny else 1))
                    kit.row(method=name, warm_up=time.perf_counter() - begin, captures=len(kit.captures) - before)
    medians = {key: statistics.median(values) for key, values in speeds.items()}

    def ratios(name: str, other: str) -> list[float]:
        return [
            medians[name, q] / medians[other, q] for q in prompts if (name, q) in medians and (other, q) in medians
        ]

    for name in ways:
        speed = [medians[name, question] for question in prompts if (name, question) in medians]
        against = {other: ratios(name, other) for other in BASELINES}
        kit.row(method=name, tokens_per_second=statistics.median(speed) if speed else None, times=against)
    if against := ratios("eagle", "static"):
        kit.bar("eagle, times the compiled static cache", statistics.median(against), at_least=1.5)
    if against := ratios("auto", "eagle"):
        kit.bar("auto on its worst question, times eagle", min(against), at_least=0.97)
    profile(kit, model, next(iter(prompts.values())), count, ways["eagle"])


def profile(kit: Kit, model: Any, inputs: Any, count: int, how: dict[str, Any]) -> None:
    """Profile a step: a call less one that ends with its first token, divided by the number of steps."""
    begin, whole = (_profiled(kit, model, inputs, tokens, how) for tokens in (1, count))
    steps, whole_calls = model.last_speculation.num_target_forwards, whole[0]
    whole_calls.subtract(begin[0])
    whole[1].subtract(begin[1])
    kit.row(
        steps=steps, calls_per_step={name: number / steps for name, number in whole_calls.items()},
        device_ms_per_step=sum(whole[1].values()) / steps,
        slowest_ms_per_step={name[:80]: ms / steps for name, ms in whole[1].most_common(SLOWEST)},
    )  # fmt: skip


def _profiled(kit: Kit, model: Any, inputs: Any, count: int, how: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Return the number of driver calls, and milliseconds of the device by operation, of one answer."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiled:
        answer(kit, model, inputs, count, how)
    calls, milliseconds = Counter[str](), Counter[str]()
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CPU:
            calls.update(name for name in CALLS if event.name.startswith(name))
        else:
            milliseconds[event.name] += (event.time_range.end - event.time_range.start) / 1000
    return calls, milliseconds


def small(kit: Kit) -> None:
    """Answers of SmolLM2-135M."""
    timed(kit, *kit.smollm())


def wide(kit: Kit) -> None:
    """Answers of the 8B that writes the same text."""
    timed(kit, *kit.widened(*kit.smollm()))


def mends(kit: Kit) -> None:
    """Answer the questions cold by `auto`, as it is and with two mends of the graph path switched off."""
    for without in ("nothing", "prices of replays alone", "caches kept in captures"):
        model, head = kit.smollm()
        model.add_drafter(EagleDrafter(head), "eagle")
        kit.empties_caches = without == "caches kept in captures"
        prices = mock.patch.object(graphs, "note_one_time_work")
        with prices if without == "prices of replays alone" else nullcontext():
            for question, inputs in kit.prompts(2 if kit.tiny else QUESTIONS).items():
                before = len(kit.captures)
                how = {"speculative": {"method": "auto", "compile": "cuda_graph"}}
                seconds, ids = answer(kit, model, inputs, 12 if kit.tiny else NEW_TOKENS, how)
                kit.row(
                    without=without, question=question, tokens=len(ids), call_seconds=seconds,
                    tau=model.last_speculation.mean_accepted_length, capture_seconds=kit.captures[before:],
                )  # fmt: skip
        kit.empties_caches = False


def float32(kit: Kit) -> None:
    """Compare answers in float32 with plain ones, with TF32 and without."""
    model, head = kit.smollm()
    model.float().add_drafter(EagleDrafter(head.float()), "eagle")
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        try:
            for question, inputs in kit.prompts(2 if kit.tiny else QUESTIONS).items():
                count = 12 if kit.tiny else NEW_TOKENS
                _, plain = answer(kit, model, inputs, count, {})
                for method in ("eagle", "auto"):
                    settings = {"method": method, "compile": "cuda_graph"}
                    seconds, ids = answer(kit, model, inputs, count, {"speculative": settings})
                    kit.row(
                        precision=precision, question=question, method=method, call_seconds=seconds,
                        equal=ids == plain, forwards=model.last_speculation.forwards,
                    )  # fmt: skip
        finally:
            torch.set_float32_matmul_precision(before)


PARTS = {"small": small, "wide": wide, "mends": mends, "float32": float32}

if __name__ == "__main__":
    sys.exit(main(PARTS, __doc__))
