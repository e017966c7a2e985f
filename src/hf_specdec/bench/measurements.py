"""`Measurement`, one method on one question, and the interface of methods that run in another program."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from hf_specdec.bench.machine import is_disturbed


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
