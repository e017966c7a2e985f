"""Run and report the comparison of plain and speculative decoding that `hf-specdec demo` prints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import TextStreamer

from hf_specdec.generation.loading import encode
from hf_specdec.reporting.stats import SpeculationStats, shown_tau

PROMPT = "Explain step by step how to work out how many minutes there are in a week."


class _SilentStreamer(TextStreamer):
    """A text streamer that decodes the tokens but prints nothing."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Do nothing instead of printing the text."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Answer, speeds and statistics of plain and speculative decoding on one prompt."""

    text: str  # the speculative answer
    pieces: tuple[str, ...]  # that answer without its first token, one piece per verify forward
    ids_equal: bool  # whether both answers have the same token ids
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    speculation: SpeculationStats

    @property
    def speed_up(self) -> float:
        """Ratio of the tokens per second of speculative to plain decoding."""
        return self.speculative_tokens_per_second / self.plain_tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """Return the speed-up and all fields except `pieces` as JSON-serialisable values."""
        return {
            "text": self.text,
            "ids_equal": self.ids_equal,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "speculative_tokens_per_second": self.speculative_tokens_per_second,
            "speed_up": self.speed_up,
            "speculation": self.speculation.to_dict(),
        }


def run(
    model: Any, tokenizer: Any, prompt: str, *, method: str, max_new_tokens: int, stream: bool = False
) -> DemoResult:
    """Answer a prompt by greedy decoding, first speculatively, then plainly; compare token ids and speeds.

    Before the timed calls, both decode a few tokens, so that one-time work such as compilation is not timed.

    Args:
        model: A model with `SpeculativeGenerationMixin`.
        tokenizer: Its tokenizer.
        prompt: The prompt.
        method: Method of the speculative call.
        max_new_tokens: Maximum number of tokens of each answer.
        stream: Print the speculative answer to stdout while it is decoded. The plain answer is then sent to a
            streamer that prints nothing, so that both times include turning tokens into text.
    """
    inputs = encode(tokenizer, prompt, model.device)
    length = inputs["input_ids"].shape[1]

    def timed(tokens: int, **options: Any) -> tuple[Tensor, float]:
        begin = time.perf_counter()
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)[0, length:]
        return ids, len(ids) / (time.perf_counter() - begin)

    for speculative in (None, method):
        timed(8, speculative=speculative)
    printing, silent = (
        kind(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
        for kind in (TextStreamer, _SilentStreamer)
    )
    speculative_ids, speculative_speed = timed(max_new_tokens, speculative=method, streamer=printing)
    stats: SpeculationStats = model.last_speculation
    plain_ids, plain_speed = timed(max_new_tokens, streamer=silent)
    ends = [1, *(1 + sum(stats.accepted_per_step[0][: i + 1]) for i in range(stats.num_target_forwards))]
    return DemoResult(
        text=tokenizer.decode(speculative_ids, skip_special_tokens=True),
        pieces=tuple(tokenizer.decode(speculative_ids[a:b]) for a, b in pairwise(ends)),
        ids_equal=torch.equal(plain_ids, speculative_ids),
        plain_tokens_per_second=plain_speed,
        speculative_tokens_per_second=speculative_speed,
        speculation=stats,
    )


def report(result: DemoResult, console: Console) -> None:
    """Print speeds, tau, whether the token ids are equal, the steps with the most tokens, and acceptance by depth."""
    stats = result.speculation
    table = Table("", "tokens/s", "tokens per forward (tau)")
    table.add_row("plain generate()", f"{result.plain_tokens_per_second:.1f}", "1.00")
    table.add_row(
        f"speculative={stats.method!r}", f"{result.speculative_tokens_per_second:.1f}",
        shown_tau(stats.mean_accepted_length),
    )  # fmt: skip
    console.print(table)
    console.print(f"speed-up: {result.speed_up:.2f}x   tau: {shown_tau(stats.mean_accepted_length)}")
    console.print(f"token ids equal: {'yes' if result.ids_equal else 'no'}")
    best = sorted(zip(stats.accepted_per_step[0], result.pieces, strict=True), key=lambda step: -step[0])[:5]
    console.print("steps with the most tokens (tokens per target forward, text):")
    for count, piece in best:
        console.print(f"  {count}  {piece!r}", markup=False, highlight=False)
    for depth, share in enumerate(stats.acceptance_by_depth, start=1):
        console.print(f"  depth {depth}: accepted in {share:4.0%} of the forwards", highlight=False)
