"""Measure methods against plain `generate()`: interleaved per prompt in one process, medians, one token counter.

Prompts come in the EAGLE / Spec-Bench schema (`question_id, category, turns`).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.loading import encode

PEERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transformers_prompt_lookup": {"prompt_lookup_num_tokens": 10},
}
"""Methods that are transformers' own: the baseline and the peer."""

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
"""Spec-Bench's first categories come from MT-bench and count as one, `mt_bench`."""


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of a benchmark file."""

    question_id: str
    category: str
    turns: tuple[str, ...]


@dataclass(slots=True)
class Measurement:
    """One method on one prompt."""

    question_id: str
    category: str
    method: str
    num_tokens: int
    seconds: list[float]  # one per round
    ids_equal: bool  # to plain's
    first_difference: int | None  # index of the first differing token
    top_two_gap: float | None  # difference of the two highest logits there, by a plain forward
    tau: float
    stages: dict[str, float] = field(default_factory=dict)  # medians of seconds per stage

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the median of the rounds."""
        return self.num_tokens / statistics.median(self.seconds)


def read_questions(path: Path, *, limit: int | None = None, per_category: int | None = None) -> list[Question]:
    """Read a prompt file.

    Args:
        path: JSON lines with `question_id`, `category`, `turns`.
        limit: At most so many questions, taken round-robin over the categories.
        per_category: At most so many of each category.

    Raises:
        InvalidConfigError: A file or line that is none of that.
    """
    questions: list[Question] = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise InvalidConfigError(f"The prompt file {path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("it is not a JSON object")
            category = "mt_bench" if row["category"] in MT_BENCH else row["category"]
            turns = row["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
                raise TypeError("its turns are not a list of texts")
            questions.append(Question(str(row["question_id"]), category, tuple(turns)))
        except (ValueError, KeyError, TypeError) as error:
            missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidConfigError(
                f"{path}, line {number} is not a question: {missing}.", "Expected question_id, category and turns."
            ) from error
    if not questions:
        raise InvalidConfigError(
            f"{path} holds no questions.", "Expected JSON lines with question_id, category, turns."
        )
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    for category, rows in by_category.items():
        # spread over the file, so that the sub-categories of mt_bench are all met
        wanted = min(per_category or len(rows), len(rows))
        by_category[category] = [rows[i * len(rows) // wanted] for i in range(wanted)]
    rounds = max(map(len, by_category.values()), default=0)
    mixed = [rows[i] for i in range(rounds) for rows in by_category.values() if i < len(rows)]
    return mixed[:limit]


def measure(
    model: Any,
    tokenizer: Any,
    questions: Iterable[Question],
    methods: Sequence[str],
    *,
    max_new_tokens: int,
    rounds: int = 1,
    settings: dict[str, Any] | None = None,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[Measurement]:
    """Run every method on every question and yield what was seen. An error ends the run.

    Args:
        model: An attached model with its drafters.
        tokenizer: Its tokenizer.
        questions: First turns are used.
        methods: Names of `PEERS`, or anything `speculative=` takes; `plain` is always measured, first.
        max_new_tokens: Of each answer; greedy.
        rounds: Timed repetitions, interleaved over the methods.
        settings: Method name -> value for `speculative=`, where the name alone does not say it.
        idle: Called before every timed call, e.g. to wait for a quiet machine.
    """
    order = ["plain", *(method for method in methods if method != "plain")]
    options = {method: PEERS.get(method, {"speculative": (settings or {}).get(method, method)}) for method in order}

    def answer(inputs: Any, method: str, tokens: int) -> tuple[Tensor, float]:
        idle()
        begin = time.perf_counter()
        ids: Tensor = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options[method])
        return ids[0, inputs["input_ids"].shape[1] :], time.perf_counter() - begin

    warm = True
    for question in questions:
        inputs = encode(tokenizer, question.turns[0], model.device)
        if warm:
            for method in order:
                answer(inputs, method, 8)
            warm = False
        ids: dict[str, Tensor] = {}
        seconds: dict[str, list[float]] = {method: [] for method in order}
        stages: dict[str, list[dict[str, float]]] = {method: [] for method in order}
        tau: dict[str, float] = dict.fromkeys(order, 1.0)
        for _ in range(rounds):
            for method in order:
                ids[method], elapsed = answer(inputs, method, max_new_tokens)
                seconds[method].append(elapsed)
                if method not in PEERS:
                    stats = model.last_speculation
                    tau[method] = stats.mean_accepted_length
                    values = stats.to_dict()
                    stages[method].append({k: v for k, v in values.items() if k.endswith("_seconds")})
        for method in order:
            first = _first_difference(ids["plain"], ids[method])
            gap = None if first is None else _top_two_gap(model, inputs, ids["plain"][:first])
            yield Measurement(
                question.question_id, question.category, method, len(ids[method]), seconds[method],
                first is None, first, gap, tau[method],
                {key: statistics.median(row[key] for row in stages[method]) for key in (stages[method] or [{}])[0]},
            )  # fmt: skip


def summarise(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row per category and method: median tokens/s, ratios to plain (median, means, worst), mean tau, equals.

    The category `all` is over all questions.
    """
    plain = {row.question_id: row for row in measurements if row.method == "plain"}
    categories = [*dict.fromkeys(row.category for row in measurements), "all"]
    rows = []
    for category in categories:
        for method in dict.fromkeys(row.method for row in measurements):
            chosen = [row for row in measurements if row.method == method and category in (row.category, "all")]
            ratios = [row.tokens_per_second / plain[row.question_id].tokens_per_second for row in chosen]
            rows.append({
                "category": category, "method": method, "questions": len(chosen),
                "tokens_per_second": statistics.median(row.tokens_per_second for row in chosen),
                "speed_up": statistics.median(ratios),
                "speed_up_geometric_mean": statistics.geometric_mean(ratios),
                "speed_up_mean": statistics.mean(ratios), "speed_up_worst": min(ratios),
                "tau": statistics.mean(row.tau for row in chosen),
                "ids_equal": sum(row.ids_equal for row in chosen),
            })  # fmt: skip
    return rows


def environment(model: Any) -> dict[str, Any]:
    """What a figure needs beside it: hardware, versions, dtype."""
    device = (
        _processor() if model.device.type == "cpu" else str(torch.get_device_module(model.device).get_device_name())
    )
    return {
        "device": device, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "transformers": transformers.__version__, "python": platform.python_version(),
        "model": model.config._name_or_path, "dtype": str(model.dtype).removeprefix("torch."),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the next best name
    return platform.processor() or platform.machine()


def _first_difference(plain: Tensor, other: Tensor) -> int | None:
    if torch.equal(plain, other):
        return None
    width = min(len(plain), len(other))
    differing = (plain[:width] != other[:width]).nonzero()
    return int(differing[0]) if len(differing) else width


@torch.no_grad()
def _top_two_gap(model: Any, inputs: Any, answer: Tensor) -> float:
    """How near a tie the choice after `answer` was: top logit minus the second, by one plain forward."""
    ids = torch.cat([inputs["input_ids"], answer[None]], dim=-1)
    top = model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])
