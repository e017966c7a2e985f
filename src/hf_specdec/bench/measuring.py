"""Time decoding methods against plain `generate()`: every prompt runs with all methods in turn, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_specdec.bench.machine import OtherProcesses
from hf_specdec.bench.measurements import External, Measurement
from hf_specdec.bench.methods import COMPILED, MAX_WARM_UPS, PEERS, call_options, check_compiled, compiled_graphs
from hf_specdec.bench.questions import Question
from hf_specdec.generation.loading import encode_chat
from hf_specdec.generation.state import state_of

WARM_UP_TOKENS = 8
SPARE_SLOTS = 64
"""Extra slots of a static KV cache for later turns: earlier answers, tokenised again, may be some tokens longer."""


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
    all_turns: bool = False,
) -> Iterator[Measurement]:
    """Answer every question with every method, by greedy decoding, and yield a measurement of each.

    Drafters that learn keep what they learned from earlier questions with the same method, but nothing from other
    methods or from earlier rounds of the same question. Their initial state is restored at the end.

    Args:
        model: The target, with speculation attached and its drafters loaded.
        tokenizer: Its tokenizer.
        questions: Questions to answer.
        methods: Names of transformers' methods (`transformers_prompt_lookup`, `transformers_assisted`,
            `plain_static_compiled`), values of `speculative=`, keys of `settings`. A value of `speculative=` may end
            with a value of `compile`: `+kernels`, `+inductor`, `+cuda_graph`, `+compile`, `+none`. `plain` is always
            measured first.
        max_new_tokens: Length limit of each answer.
        rounds: Timed repetitions, interleaved over the methods.
        settings: By method name: a value of `speculative=` to use instead of the name, the assistant model of
            `transformers_assisted`, or an `External` that runs the method.
        idle: Called before every call, warm-up included, e.g. to wait for a quiet machine.
        all_turns: Answer all turns of a question, each method continuing its own answers, as Spec-Bench does;
            otherwise the first turn only.

    Raises:
        InvalidConfigError: A method is unknown, `transformers_assisted` has no assistant model, or transformers does
            not compile the model.
    """
    order = list(dict.fromkeys(["plain", *methods]))
    chosen = [Question(q.question_id, q.category, q.turns if all_turns else q.turns[:1]) for q in questions]
    if not chosen:
        return
    settings, longest = settings or {}, 0
    if COMPILED in order:
        longest = max(_prompt_length(tokenizer, question, max_new_tokens) for question in chosen)
    caller = _Caller(model, tokenizer, max_new_tokens, idle)
    initial = state_of(model).state_dict()
    for method in order:
        setting = settings.get(method)
        if isinstance(setting, External):
            caller.externals[method] = setting
        else:
            caller.options[method] = call_options(method, setting, model, longest + max_new_tokens)
    try:
        for method in order:
            caller.warm_up(method, chosen[0])
        caller.states = dict.fromkeys(order, initial)
        for question in chosen:
            yield from _measure_question(caller, question, order, rounds)
    finally:
        state_of(model).load_state_dict(initial)


def _prompt_length(tokenizer: Any, question: Question, max_new_tokens: int) -> int:
    """Return an upper bound, in tokens, of the last turn's prompt, which contains all earlier turns and answers."""
    texts = [text for turn in question.turns for text in (turn, "")][:-1]
    length: int = encode_chat(tokenizer, texts, torch.device("cpu"))["input_ids"].shape[1]
    earlier = len(question.turns) - 1
    return length + earlier * max_new_tokens + (SPARE_SLOTS if earlier else 0)


class _FirstToken(BaseStreamer):
    """Streamer that records the time of the first token, its second `put`; the first one is the prompt."""

    def __init__(self) -> None:
        self.puts, self.time = 0, 0.0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.time = time.perf_counter()

    def end(self) -> None:
        """Do nothing; the base class requires this method."""


@dataclass(slots=True)
class _Answer:
    """Tokens and timing of one timed call."""

    ids: Tensor  # [T] new tokens
    seconds: float
    first_token_seconds: float
    others_cores: float | None
    compiled: bool  # whether torch compiled a graph during the call
    tau: float = 1.0
    forwards: str = ""  # as in `SpeculationStats`; empty for `PEERS` and external methods
    stages: dict[str, float] = field(default_factory=dict)  # seconds per stage; empty for `PEERS` and external methods


class _Caller:
    """The model with each method's options and learned state; runs and times calls."""

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int, idle: Callable[[], None]) -> None:
        self.model, self.tokenizer, self.max_new_tokens, self.idle = model, tokenizer, max_new_tokens, idle
        self.options: dict[str, dict[str, Any]] = {}
        self.externals: dict[str, External] = {}
        self.warm_up_seconds: dict[str, float] = {}
        self.states: dict[str, Any] = {}  # learned state of the drafters, by method

    def encode(self, texts: Sequence[str]) -> Any:
        """Tokenise a conversation (user and assistant in turn) into the inputs of `generate()`."""
        return encode_chat(self.tokenizer, texts, self.model.device)

    def text_of(self, ids: Tensor) -> str:
        """Decode an answer to the text that the prompts of later turns contain."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.strip()

    def timed_call(self, inputs: Any, method: str) -> _Answer:
        """Run and time one call; load the method's learned state before it and store the new one afterwards."""
        if method in PEERS or method in self.externals:
            return self.answer(inputs, method)
        state = state_of(self.model)
        state.load_state_dict(self.states[method])
        answer = self.answer(inputs, method)
        self.states[method] = state.state_dict()
        return answer

    def warm_up(self, method: str, question: Question) -> None:
        """Call a method until a call compiles nothing, at most `MAX_WARM_UPS` times, and record the total duration.

        Raises:
            InvalidConfigError: The method should have compiled the model's forward, but did not.
        """
        inputs, begin = self.encode(question.turns[:1]), time.perf_counter()
        if method not in PEERS and method not in self.externals:  # also what "auto" would compile only in later calls
            self.model.warmup(self.options[method]["speculative"], prompt_length=inputs["input_ids"].shape[1])
        for _ in range(MAX_WARM_UPS):
            if not self.answer(inputs, method, min(WARM_UP_TOKENS, self.max_new_tokens)).compiled:
                break
        self.warm_up_seconds[method] = time.perf_counter() - begin
        check_compiled(method, self.model)

    def answer(self, inputs: Any, method: str, max_new_tokens: int | None = None) -> _Answer:
        """Run and time one call, with the drafters in their current state."""
        self.idle()
        count = max_new_tokens or self.max_new_tokens
        if method in self.externals:
            return self._call_external(inputs, self.externals[method], count)
        self._wait_for_device()
        streamer, graphs, others = _FirstToken(), compiled_graphs(), OtherProcesses()
        begin = time.perf_counter()
        ids: Tensor = self.model.generate(
            **inputs, max_new_tokens=count, do_sample=False, streamer=streamer, **self.options[method]
        )
        self._wait_for_device()
        seconds = time.perf_counter() - begin
        answer = _Answer(
            ids[0, inputs["input_ids"].shape[1] :], seconds, streamer.time - begin, others.cores(),
            compiled_graphs() > graphs,
        )  # fmt: skip
        if method not in PEERS:
            stats = self.model.last_speculation
            answer.tau, answer.forwards = stats.mean_accepted_length, stats.forwards
            answer.stages = {key: value for key, value in stats.to_dict().items() if key.endswith("_seconds")}
        return answer

    def _wait_for_device(self) -> None:
        if self.model.device.type != "cpu":
            torch.accelerator.synchronize()

    def _call_external(self, inputs: Any, external: External, max_new_tokens: int) -> _Answer:
        prompt: Tensor = inputs["input_ids"]
        others = OtherProcesses(external.processes())
        reply = external.ask(prompt[0].tolist(), max_new_tokens)
        cores = others.cores()
        ids = torch.tensor(reply.ids, dtype=prompt.dtype, device=prompt.device)
        return _Answer(ids, reply.seconds, reply.first_token_seconds, cores, compiled=False, tau=reply.tau or 1.0)


@dataclass(slots=True)
class _Round:
    """One method's answers to the turns of a question in one round."""

    texts: list[str] = field(default_factory=list)  # messages of the user and answers of the method in turn
    prompts: list[Any] = field(default_factory=list)  # tokenised, one per turn
    answers: list[_Answer] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(answer.seconds for answer in self.answers)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds per stage, summed over the turns."""
        return {key: sum(answer.stages[key] for answer in self.answers) for key in self.answers[0].stages}

    @property
    def others_cores(self) -> float | None:
        """Mean number of cores used by other processes, weighted by the turns' seconds; None if one is unknown."""
        used = [(answer.others_cores, answer.seconds) for answer in self.answers]
        known = [cores * seconds for cores, seconds in used if cores is not None]
        return sum(known) / self.seconds if len(known) == len(used) else None


def _measure_question(caller: _Caller, question: Question, order: Sequence[str], rounds: int) -> Iterator[Measurement]:
    """Yield one measurement of a question per method; drafters start each round in the same state."""
    seen: dict[str, list[_Round]] = {method: [_Round() for _ in range(rounds)] for method in order}
    before = dict(caller.states)
    for number in range(rounds):
        caller.states = dict(before)
        for turn in question.turns:
            for method in order:
                _take_turn(caller, seen[method][number], turn, method)
    plain = seen["plain"][-1]
    for method in order:
        all_rounds, last = seen[method], seen[method][-1]
        difference = _first_difference(plain, last)
        gap = None
        if difference is not None:
            turn_index, index = difference
            gap = _top_two_gap(caller.model, plain.prompts[turn_index], plain.answers[turn_index].ids[:index])
        yield Measurement(
            question_id=question.question_id, category=question.category, method=method,
            num_tokens=sum(len(answer.ids) for answer in last.answers),
            seconds=[each.seconds for each in all_rounds],
            ids_equal=difference is None, first_difference=None if difference is None else difference[1],
            top_two_gap=gap, tau=statistics.mean(answer.tau for answer in last.answers),
            stages={key: statistics.median(each.stages[key] for each in all_rounds) for key in last.stages},
            first_token_seconds=[sum(answer.first_token_seconds for answer in each.answers) for each in all_rounds],
            others_cores=[each.others_cores for each in all_rounds],
            turns=len(question.turns), warm_up_seconds=caller.warm_up_seconds[method],
            compiled_in_rounds=sum(any(answer.compiled for answer in each.answers) for each in all_rounds),
            forwards=last.answers[-1].forwards,
        )  # fmt: skip


def _take_turn(caller: _Caller, seen: _Round, turn: str, method: str) -> None:
    """Answer one turn with a method, and append the turn and the answer to the method's conversation."""
    seen.texts.append(turn)
    inputs = caller.encode(seen.texts)
    answer = caller.timed_call(inputs, method)
    seen.prompts.append(inputs)
    seen.answers.append(answer)
    seen.texts.append(caller.text_of(answer.ids))


def _first_difference(plain: _Round, other: _Round) -> tuple[int, int] | None:
    """Return the index of the first turn whose answers differ and of the first token that differs in it, or None.

    If one answer is the beginning of the other, the index of the token is the length of the shorter one.
    """
    for turn, (expected, answer) in enumerate(zip(plain.answers, other.answers, strict=True)):
        if not torch.equal(expected.ids, answer.ids):
            width = min(len(expected.ids), len(answer.ids))
            differing = (expected.ids[:width] != answer.ids[:width]).nonzero()
            return turn, int(differing[0]) if len(differing) else width
    return None


@torch.no_grad()
def _top_two_gap(model: Any, inputs: Any, answer: Tensor) -> float:
    """Return the difference of the two highest logits for the token after `answer`, from a forward without cache."""
    ids = torch.cat([inputs["input_ids"], answer[None]], dim=-1)
    top = model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])
