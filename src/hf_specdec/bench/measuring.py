"""Methods against plain `generate()`: interleaved per prompt in one process, medians, one token counter."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_specdec.bench.machine import OtherProcesses, is_disturbed
from hf_specdec.bench.methods import COMPILED, FIRST_TRIES, PEERS, call_options, check_compiled, compiled_graphs
from hf_specdec.bench.questions import Question
from hf_specdec.generation.loading import encode_chat
from hf_specdec.generation.state import state_of

WARM_UP_TOKENS = 8
SPARE_SLOTS = 64
"""Of a static cache: the answers of earlier turns are read again as text, and may be some tokens longer then."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What another program answered."""

    ids: list[int]  # new tokens, greedy, up to and with the one that ends the answer
    seconds: float
    first_token_seconds: float
    tau: float | None = None  # None: it does not tell


@dataclass(frozen=True, slots=True)
class External:
    """A method that runs in another program: it is given the prompt's ids and how many new tokens there may be."""

    ask: Callable[[list[int], int], Reply]
    processes: Callable[[], Sequence[psutil.Process]] = tuple  # whose CPU time is not that of others


@dataclass(slots=True)
class Measurement:
    """One method on one prompt, or on all turns of a conversation: tokens and seconds are sums over its turns."""

    question_id: str
    category: str
    method: str
    num_tokens: int
    seconds: list[float]  # one per round
    ids_equal: bool  # to plain's, in every turn
    first_difference: int | None  # index of the first differing token, in the first turn that differs
    top_two_gap: float | None  # difference of the two highest logits there, by a plain forward
    tau: float  # mean over the turns; 1.0 where a method does not tell it, as transformers' own
    stages: dict[str, float] = field(default_factory=dict)  # medians of seconds per stage
    first_token_seconds: list[float] = field(default_factory=list)  # one per round, the prompt's forward included
    others_cores: list[float | None] = field(default_factory=list)  # cores that other processes used, one per round
    turns: int = 1
    warm_up_seconds: float = 0.0  # of this method's calls before the first timed one, compilation included
    compiled_in_rounds: int = 0  # timed rounds in which something was compiled all the same

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the median of the rounds."""
        return self.num_tokens / statistics.median(self.seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The same behind the first token of every turn; None where nothing follows it, or its time is not known."""
        rest = [whole - first for whole, first in zip(self.seconds, self.first_token_seconds, strict=False)]
        if not rest or self.num_tokens <= self.turns or statistics.median(rest) <= 0:
            return None
        return (self.num_tokens - self.turns) / statistics.median(rest)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds, median over the rounds, mean over the turns; None where it is not known."""
        return statistics.median(self.first_token_seconds) / self.turns if self.first_token_seconds else None

    @property
    def disturbed_rounds(self) -> int:
        """Rounds in which other processes used more of the machine than a figure can bear."""
        return sum(map(is_disturbed, self.others_cores, self.seconds))


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
    """Run every method on every question and yield what was seen. An error ends the run.

    Drafters that learn know what their own method said to the questions before, and nothing of what others, or
    earlier rounds, said to this one; in the end they know what they knew before.

    Args:
        model: An attached model with its drafters.
        tokenizer: Its tokenizer.
        questions: What to ask.
        methods: Names of `PEERS`, or anything `speculative=` takes; `plain` is always measured, first.
        max_new_tokens: Of each answer; greedy.
        rounds: Timed repetitions, interleaved over the methods.
        settings: Method name -> what it needs beside its name: the value for `speculative=`, the assistant model of
            `transformers_assisted`, or another program that has the answer (`External`).
        idle: Called before every timed call, e.g. to wait for a quiet machine.
        all_turns: Ask all turns of a question, each method with its own answers to the turns before, as Spec-Bench
            does; else the first turn alone.

    Raises:
        InvalidConfigError: A method lacks what it needs.
    """
    order = list(dict.fromkeys(["plain", *methods]))
    asked = [Question(q.question_id, q.category, q.turns if all_turns else q.turns[:1]) for q in questions]
    if not asked:
        return
    given, longest = settings or {}, 0
    if COMPILED in order:
        longest = max(_prompt_length(tokenizer, question, max_new_tokens) for question in asked)
    caller = _Caller(model, tokenizer, max_new_tokens, idle)
    known = state_of(model).state_dict()
    for method in order:
        setting = given.get(method)
        if isinstance(setting, External):
            caller.externals[method] = setting
        else:
            caller.options[method] = call_options(method, setting, model, longest + max_new_tokens)
    try:
        for method in order:
            caller.warm_up(method, asked[0])
        caller.states = dict.fromkeys(order, known)
        for question in asked:
            yield from _measure_question(caller, question, order, rounds)
    finally:
        state_of(model).load_state_dict(known)


def _prompt_length(tokenizer: Any, question: Question, max_new_tokens: int) -> int:
    """Tokens of the last turn's prompt, when every answer before it is as long as it may be."""
    texts = [text for turn in question.turns for text in (turn, "")][:-1]
    length: int = encode_chat(tokenizer, texts, torch.device("cpu"))["input_ids"].shape[1]
    earlier = len(question.turns) - 1
    return length + earlier * max_new_tokens + (SPARE_SLOTS if earlier else 0)


class _FirstToken(BaseStreamer):
    """Notes down when the first token is there: the second `put`, for the first one is the prompt."""

    def __init__(self) -> None:
        self.puts, self.moment = 0, 0.0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.moment = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to be done."""


@dataclass(slots=True)
class _Answer:
    """One timed call."""

    ids: Tensor  # [T] new tokens
    seconds: float
    first_token_seconds: float
    others_cores: float | None
    compiled: bool
    tau: float = 1.0
    stages: dict[str, float] = field(default_factory=dict)  # seconds per stage, of our methods


class _Caller:
    """Has every method of one run answer, and times it."""

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int, idle: Callable[[], None]) -> None:
        self.model, self.tokenizer, self.max_new_tokens, self.idle = model, tokenizer, max_new_tokens, idle
        self.options: dict[str, dict[str, Any]] = {}
        self.externals: dict[str, External] = {}
        self.warm_up_seconds: dict[str, float] = {}
        self.states: dict[str, Any] = {}  # what drafters have learned in each method's own calls

    def encode(self, texts: Sequence[str]) -> Any:
        """A conversation as inputs of `generate()`."""
        return encode_chat(self.tokenizer, texts, self.model.device)

    def text_of(self, ids: Tensor) -> str:
        """An answer as a later turn reads it."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.strip()

    def ask(self, inputs: Any, method: str) -> _Answer:
        """One call, timed, of a method whose drafters know its own earlier calls and no others."""
        if method in PEERS or method in self.externals:
            return self.answer(inputs, method)
        state = state_of(self.model)
        state.load_state_dict(self.states[method])
        answer = self.answer(inputs, method)
        self.states[method] = state.state_dict()
        return answer

    def warm_up(self, method: str, question: Question) -> None:
        """Call a method until a call compiles nothing.

        Raises:
            InvalidConfigError: It was to compile the model's forward, and did not.
        """
        inputs, begin = self.encode(question.turns[:1]), time.perf_counter()
        for _ in range(FIRST_TRIES):
            if not self.answer(inputs, method, min(WARM_UP_TOKENS, self.max_new_tokens)).compiled:
                break
        self.warm_up_seconds[method] = time.perf_counter() - begin
        check_compiled(method, self.model)

    def answer(self, inputs: Any, method: str, max_new_tokens: int | None = None) -> _Answer:
        """One call, timed."""
        self.idle()
        count = max_new_tokens or self.max_new_tokens
        if method in self.externals:
            return self._answer_elsewhere(inputs, self.externals[method], count)
        self._wait_for_device()
        streamer, graphs, others = _FirstToken(), compiled_graphs(), OtherProcesses()
        begin = time.perf_counter()
        ids: Tensor = self.model.generate(
            **inputs, max_new_tokens=count, do_sample=False, streamer=streamer, **self.options[method]
        )
        self._wait_for_device()
        seconds = time.perf_counter() - begin
        answer = _Answer(
            ids[0, inputs["input_ids"].shape[1] :], seconds, streamer.moment - begin, others.cores(),
            compiled_graphs() > graphs,
        )  # fmt: skip
        if method not in PEERS:
            stats = self.model.last_speculation
            answer.tau = stats.mean_accepted_length
            answer.stages = {key: value for key, value in stats.to_dict().items() if key.endswith("_seconds")}
        return answer

    def _wait_for_device(self) -> None:
        if self.model.device.type != "cpu":
            torch.accelerator.synchronize()

    def _answer_elsewhere(self, inputs: Any, external: External, max_new_tokens: int) -> _Answer:
        prompt: Tensor = inputs["input_ids"]
        others = OtherProcesses(external.processes())
        reply = external.ask(prompt[0].tolist(), max_new_tokens)
        cores = others.cores()
        ids = torch.tensor(reply.ids, dtype=prompt.dtype, device=prompt.device)
        return _Answer(ids, reply.seconds, reply.first_token_seconds, cores, compiled=False, tau=reply.tau or 1.0)


@dataclass(slots=True)
class _Round:
    """What one method did in one round of a conversation."""

    texts: list[str] = field(default_factory=list)  # the user's and the method's in turn
    prompts: list[Any] = field(default_factory=list)
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
        """Mean over the time of all turns; None where one is not known."""
        used = [(answer.others_cores, answer.seconds) for answer in self.answers]
        known = [cores * seconds for cores, seconds in used if cores is not None]
        return sum(known) / self.seconds if len(known) == len(used) else None


def _measure_question(caller: _Caller, question: Question, order: Sequence[str], rounds: int) -> Iterator[Measurement]:
    """All methods in turn, turn by turn, round by round; no round knows the answers of the one before."""
    seen: dict[str, list[_Round]] = {method: [_Round() for _ in range(rounds)] for method in order}
    before = dict(caller.states)
    for number in range(rounds):
        caller.states = dict(before)
        for turn in question.turns:
            for method in order:
                _take_turn(caller, seen[method][number], turn, method)
    plain = seen["plain"][-1]
    for method in order:
        done, last = seen[method], seen[method][-1]
        difference = _first_difference(plain, last)
        gap = None
        if difference is not None:
            which, index = difference
            gap = _top_two_gap(caller.model, plain.prompts[which], plain.answers[which].ids[:index])
        yield Measurement(
            question_id=question.question_id, category=question.category, method=method,
            num_tokens=sum(len(answer.ids) for answer in last.answers),
            seconds=[one.seconds for one in done],
            ids_equal=difference is None, first_difference=None if difference is None else difference[1],
            top_two_gap=gap, tau=statistics.mean(answer.tau for answer in last.answers),
            stages={key: statistics.median(one.stages[key] for one in done) for key in last.stages},
            first_token_seconds=[sum(answer.first_token_seconds for answer in one.answers) for one in done],
            others_cores=[one.others_cores for one in done],
            turns=len(question.turns), warm_up_seconds=caller.warm_up_seconds[method],
            compiled_in_rounds=sum(any(answer.compiled for answer in one.answers) for one in done),
        )  # fmt: skip


def _take_turn(caller: _Caller, seen: _Round, turn: str, method: str) -> None:
    """One answer, and what it adds to the conversation."""
    seen.texts.append(turn)
    inputs = caller.encode(seen.texts)
    answer = caller.ask(inputs, method)
    seen.prompts.append(inputs)
    seen.answers.append(answer)
    seen.texts.append(caller.text_of(answer.ids))


def _first_difference(plain: _Round, other: _Round) -> tuple[int, int] | None:
    """The first turn whose answer is not plain's, and the index of the first differing token there."""
    for turn, (expected, answer) in enumerate(zip(plain.answers, other.answers, strict=True)):
        if not torch.equal(expected.ids, answer.ids):
            width = min(len(expected.ids), len(answer.ids))
            differing = (expected.ids[:width] != answer.ids[:width]).nonzero()
            return turn, int(differing[0]) if len(differing) else width
    return None


@torch.no_grad()
def _top_two_gap(model: Any, inputs: Any, answer: Tensor) -> float:
    """How near a tie the choice after `answer` was: top logit minus the second, by one plain forward."""
    ids = torch.cat([inputs["input_ids"], answer[None]], dim=-1)
    top = model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])
