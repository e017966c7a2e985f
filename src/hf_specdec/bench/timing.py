"""Time decoding methods against plain `generate()`: every prompt runs with all methods in turn, in one process."""

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
from hf_specdec.bench.methods import COMPILED, MAX_WARM_UPS, PEERS, call_options, check_compiled, compiled_graphs
from hf_specdec.bench.questions import Question
from hf_specdec.generation.loading import encode_chat
from hf_specdec.generation.state import state_of


@dataclass(frozen=True, slots=True)
class Reply:
    """Timed answer of another program to one prompt.

    Args:
        ids: New tokens of greedy decoding, including the EOS if generated.
        seconds: Duration of the whole answer.
        first_token_seconds: Time until the first token.
        tau: Tokens per target forward; None if unknown.
    """

    ids: list[int]
    seconds: float
    first_token_seconds: float
    tau: float | None = None


@dataclass(frozen=True, slots=True)
class External:
    """Decoding method that runs in another program, such as an inference server.

    Args:
        ask: Returns the reply; called with the prompt's ids and the maximum number of new tokens.
        processes: Returns the processes of that program, which are not counted as other processes.
    """

    ask: Callable[[list[int], int], Reply]
    processes: Callable[[], Sequence[psutil.Process]] = tuple


@dataclass(slots=True)
class Measurement:
    """Speed and output of one method on one question; tokens and seconds are sums over the question's turns.

    Args:
        question_id: Id of the question.
        category: Its category.
        method: Name of the method.
        num_tokens: Number of new tokens in the last round.
        seconds: Duration of each round.
        ids_equal: Whether every turn has the same token ids as plain decoding.
        first_difference: Index of the first token that differs from plain, in the first turn that differs.
        top_two_gap: Difference of the two highest logits at that index, after plain's tokens.
        tau: Tokens per target forward, mean over the turns; 1.0 if unknown, as for transformers' methods.
        stages: Median seconds per stage.
        first_token_seconds: Time until the first token in each round, prefill included.
        others_cores: Number of cores that other processes used in each round; None if unknown.
        turns: Number of turns that were answered.
        warm_up_seconds: Duration of this method's untimed calls, compilation included.
        compiled_in_rounds: Timed rounds in which something was compiled.
        forwards: How the verify forwards ran, see `SpeculationStats.forwards`; empty if unknown.
        nodes: Nodes per verify forward, root included, mean over the turns; 1.0 if unknown.
    """

    question_id: str
    category: str
    method: str
    num_tokens: int
    seconds: list[float]
    ids_equal: bool
    first_difference: int | None
    top_two_gap: float | None
    tau: float
    stages: dict[str, float] = field(default_factory=dict)
    first_token_seconds: list[float] = field(default_factory=list)
    others_cores: list[float | None] = field(default_factory=list)
    turns: int = 1
    warm_up_seconds: float = 0.0
    compiled_in_rounds: int = 0
    forwards: str = ""
    nodes: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole calls, from the median of the rounds' durations."""
        return self.num_tokens / statistics.median(self.seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens per second after each turn's first token; None without such tokens or a positive time for them."""
        rest = [total - first for total, first in zip(self.seconds, self.first_token_seconds, strict=False)]
        if not rest or self.num_tokens <= self.turns or statistics.median(rest) <= 0:
            return None
        return (self.num_tokens - self.turns) / statistics.median(rest)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds until a call's first token, median over rounds and mean over turns; None if unknown."""
        return statistics.median(self.first_token_seconds) / self.turns if self.first_token_seconds else None

    @property
    def disturbed_rounds(self) -> int:
        """Number of rounds in which other processes used more than 5 % of a core (and at least 5 ticks in all)."""
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
    # earlier answers, tokenised again, may be some tokens longer
    return length + earlier * max_new_tokens + (64 if earlier else 0)


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
    nodes: float = 1.0


class _Caller:
    """The model with each method's options and learned state; runs and times calls."""

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int, idle: Callable[[], None]) -> None:
        self.model, self.tokenizer, self.max_new_tokens, self.idle = model, tokenizer, max_new_tokens, idle
        self.options: dict[str, dict[str, Any]] = {}
        self.externals: dict[str, External] = {}
        self.warm_up_seconds: dict[str, float] = {}
        self.states: dict[str, Any] = {}  # learned state of the drafters, by method

    def is_own(self, method: str) -> bool:
        """Whether a method is one of this package."""
        return method not in PEERS and method not in self.externals

    def encode(self, texts: Sequence[str]) -> Any:
        """Tokenise a conversation (user and assistant in turn) into the inputs of `generate()`."""
        return encode_chat(self.tokenizer, texts, self.model.device)

    def take_turn(self, seen: _Round, turn: str, method: str) -> None:
        """Answer one turn with the method's learned state, and store the new one; append turn and answer to `seen`."""
        seen.texts.append(turn)
        inputs = self.encode(seen.texts)
        state = state_of(self.model)
        if self.is_own(method):
            state.load_state_dict(self.states[method])
        answer = self.answer(inputs, method)
        if self.is_own(method):
            self.states[method] = state.state_dict()
        seen.prompts.append(inputs)
        seen.answers.append(answer)
        seen.texts.append(self.tokenizer.decode(answer.ids, skip_special_tokens=True).strip())

    def warm_up(self, method: str, question: Question) -> None:
        """Call a method until a call compiles nothing, at most `MAX_WARM_UPS` times, and record the total duration."""
        inputs, begin = self.encode(question.turns[:1]), time.perf_counter()
        if self.is_own(method):  # also what "auto" would compile only in later calls
            self.model.warmup(self.options[method]["speculative"], prompt_length=inputs["input_ids"].shape[1])
        for _ in range(MAX_WARM_UPS):
            if not self.answer(inputs, method, min(8, self.max_new_tokens)).compiled:
                break
        self.warm_up_seconds[method] = time.perf_counter() - begin
        check_compiled(method, self.model)

    def answer(self, inputs: Any, method: str, max_new_tokens: int | None = None) -> _Answer:
        """Run and time one call, with the drafters in their current state."""
        self.idle()
        prompt: Tensor = inputs["input_ids"]
        count = max_new_tokens or self.max_new_tokens
        if method in self.externals:
            external = self.externals[method]
            others = OtherProcesses(external.processes())
            reply = external.ask(prompt[0].tolist(), count)
            cores = others.cores()
            ids = torch.tensor(reply.ids, dtype=prompt.dtype, device=prompt.device)
            return _Answer(ids, reply.seconds, reply.first_token_seconds, cores, compiled=False, tau=reply.tau or 1.0)
        self._wait_for_device()
        streamer, graphs, others = _FirstToken(), compiled_graphs(), OtherProcesses()
        begin = time.perf_counter()
        ids = self.model.generate(
            **inputs, max_new_tokens=count, do_sample=False, streamer=streamer, **self.options[method]
        )[0, prompt.shape[1] :]
        self._wait_for_device()
        seconds = time.perf_counter() - begin
        compiled = compiled_graphs() > graphs
        answer = _Answer(ids, seconds, streamer.time - begin, others.cores(), compiled)
        if method not in PEERS:
            stats = self.model.last_speculation
            answer.tau, answer.forwards = stats.mean_accepted_length, stats.forwards
            answer.nodes = 1 + stats.num_drafted_tokens / max(stats.num_target_forwards, 1)
            answer.stages = {key: value for key, value in stats.to_dict().items() if key.endswith("_seconds")}
        return answer

    def _wait_for_device(self) -> None:
        if self.model.device.type != "cpu":
            torch.accelerator.synchronize()


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
                caller.take_turn(seen[method][number], turn, method)
    plain = seen["plain"][-1]
    for method in order:
        all_rounds, last = seen[method], seen[method][-1]
        difference = _first_difference(plain, last)
        gap = None
        if difference is not None:
            turn_index, index = difference
            answer = plain.answers[turn_index].ids[:index]
            ids = torch.cat([plain.prompts[turn_index]["input_ids"], answer[None]], dim=-1)
            with torch.no_grad():  # without a cache
                logits = caller.model(input_ids=ids, use_cache=False).logits[0, -1]
            top = logits.float().topk(2).values
            gap = float(top[0] - top[1])
        stages = {
            key: statistics.median(sum(answer.stages[key] for answer in each.answers) for each in all_rounds)
            for key in last.answers[0].stages
        }
        yield Measurement(
            question_id=question.question_id, category=question.category, method=method,
            num_tokens=sum(len(answer.ids) for answer in last.answers),
            seconds=[each.seconds for each in all_rounds],
            ids_equal=difference is None, first_difference=None if difference is None else difference[1],
            top_two_gap=gap, tau=statistics.mean(answer.tau for answer in last.answers), stages=stages,
            first_token_seconds=[sum(answer.first_token_seconds for answer in each.answers) for each in all_rounds],
            others_cores=[each.others_cores for each in all_rounds],
            turns=len(question.turns), warm_up_seconds=caller.warm_up_seconds[method],
            compiled_in_rounds=sum(any(answer.compiled for answer in each.answers) for each in all_rounds),
            forwards=last.answers[-1].forwards, nodes=statistics.mean(answer.nodes for answer in last.answers),
        )  # fmt: skip


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
