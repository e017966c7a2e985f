"""Measure speed at any tau without a head, with a drafter that replays a known answer at a chosen acceptance.

    python benchmarks/oracle.py --taus 1 2 3 4.5 6 --nodes 16 32 --json benchmarks/results/oracle_cpu_bf16.json

Drafting costs almost nothing and verification its usual time, so the result is an upper bound of the speed of real
drafters with that tau. Other benchmarks import `OracleDrafter`, and `make_sure` for models with random weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_specdec import bench
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation import loading
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import stack_trees
from hf_specdec.verification.model import text_config
from hf_specdec.verification.step import Step
from hf_specdec.verification.target import Target

GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio, modulo 1, cover the unit interval more evenly than random numbers."""

SURE = 100.0
"""Root mean square of the embedding of a `make_sure` model: large compared to what the layers add."""


class OracleDrafter(Drafter):
    """Drafts trees that contain the correct continuation to a random depth; all other tokens are wrong.

    The depth is at least k with probability p^k, limited by the depth of the tree, and tau - 1 on average. Draws are
    spread evenly (multiples of the golden ratio), so that a few steps suffice to reach the mean. Fewer tokens are
    accepted if the answer ends.

    Config fields: `num_draft_tokens` (default 16) and `num_steps` (default 2.5 (tau - 1), at least 4).

    Args:
        answers: `[B, T]` new tokens of plain `generate()` for the same prompts. In half precision a tree forward may
            choose another token after a near-tie; from there on nothing is accepted (see `report`). `make_sure`
            creates models without near-ties.
        tau: Tokens per target forward, at least 1.
        seed: Random seed.
    """

    method = "oracle"

    def __init__(self, answers: Tensor, tau: float, seed: int = 0) -> None:
        if not tau >= 1:
            raise InvalidConfigError(f"`tau` must be at least 1, got {tau!r}.")
        self.answers, self.tau, self.seed = answers.tolist(), tau, seed

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return size and depth of the trees.

        Raises:
            InvalidConfigError: The depth is too small for tau, or a tree is given.
        """
        if config.tree is not None:
            raise InvalidConfigError(f"The oracle builds its own trees, got tree={config.tree!r}.", "Remove `tree`.")
        num_nodes = config.num_draft_tokens or 16
        deep = max(4, math.ceil(2.5 * (self.tau - 1)))
        num_steps = max(1, min(config.num_steps or deep, num_nodes - 1))
        if self.tau - 1 > num_steps:
            raise InvalidConfigError(
                f"A tree of depth {num_steps} yields at most {num_steps + 1} tokens per forward, got tau={self.tau}.",
                "Raise num_draft_tokens or num_steps.",
            )
        return Budget(num_nodes, num_steps, max(level_widths(num_nodes, num_steps)))

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start replaying the answers.

        Raises:
            InvalidConfigError: The numbers of prompts and answers differ.
        """
        if len(self.answers) != len(context.roots):
            raise InvalidConfigError(
                f"The oracle has {len(self.answers)} answers, but the batch has {len(context.roots)} rows.",
                "Create an oracle for these prompts.",
            )
        return _OracleSession(self, context, text_config(target.model).vocab_size, self.limits(config).num_steps)


class _OracleSession(DraftSession):
    def __init__(self, oracle: OracleDrafter, context: DraftContext, vocab_size: int, num_steps: int) -> None:
        self._answers, self._vocab_size = oracle.answers, vocab_size
        self._random = random.Random(oracle.seed)
        self._probability = acceptance_for(oracle.tau, num_steps)
        self._device = context.roots.device
        self._roots = context.roots.tolist()
        self._draws = [self._random.random() for _ in self._roots]
        self._num_emitted = [1] * len(self._roots)
        self._diverged = [
            None if answer[:1] == [root] else 0 for answer, root in zip(self._answers, self._roots, strict=True)
        ]

    def propose(self, budget: Budget) -> Draft:
        return Draft(stack_trees([self._tree(row, budget) for row in range(len(self._roots))], self._device))

    def observe(self, step: Step) -> None:
        for row, tokens in enumerate(step.acceptance.emitted):
            known = self._answers[row][self._num_emitted[row] :]
            for place, (token, right) in enumerate(zip(tokens, known, strict=False)):
                if token != right and self._diverged[row] is None:
                    self._diverged[row] = self._num_emitted[row] + place
            self._num_emitted[row] += len(tokens)
            self._roots[row] = tokens[-1] if tokens else self._roots[row]

    def report(self) -> dict[str, Any]:
        """Return the index at which each row left the known answer; None if it never did."""
        return {"diverged_at": list(self._diverged)}

    def _tree(self, row: int, budget: Budget) -> tuple[list[int], list[int]]:
        """Return tokens and parents; each level has the children of one node, one of them correct to a drawn depth."""
        self._draws[row] = (self._draws[row] + GOLDEN) % 1
        depth = drawn_depth(self._draws[row], self._probability, budget.num_steps)
        truth = self._answers[row][self._num_emitted[row] :][: budget.num_steps]
        tokens, parents, spine = [self._roots[row]], [-1], 0
        for level, width in enumerate(level_widths(budget.num_nodes, budget.num_steps)):
            right = truth[level] if level < len(truth) else None
            first, place = self._random.randrange(self._vocab_size), self._random.randrange(width)
            wrong = [token % self._vocab_size for token in range(first, first + width + 1)]
            children = [token for token in wrong if token != right][:width]
            if level < depth and right is not None:
                children[place] = right
            parents += [spine] * width
            spine = len(tokens) + place
            tokens += children
        return tokens, parents


def level_widths(num_nodes: int, num_steps: int) -> list[int]:
    """Distribute `num_nodes`, including the root, evenly over the levels below the root.

    Example: 16 nodes on 4 levels give [4, 4, 4, 3].
    """
    each, more = divmod(num_nodes - 1, num_steps) if num_steps else (0, 0)
    return [width for level in range(num_steps) if (width := each + (level < more))]


def acceptance_for(tau: float, num_steps: int) -> float:
    """Return the probability p with p + p^2 + ... + p^num_steps = tau - 1.

    Example: 0.9142 for tau 2.75 and 2 levels (0.9142 + 0.8358 = 1.75); 1 for tau 3 and 2 levels.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        reached = sum(middle**depth for depth in range(1, num_steps + 1))
        low, high = (middle, high) if reached < tau - 1 else (low, middle)
    return high


def drawn_depth(draw: float, probability: float, num_steps: int) -> int:
    """Map a number in [0, 1) to a depth, which is at least k if the number is below probability^k.

    Example: 0.3 with probability 0.6 gives depth 2, since 0.6^2 = 0.36 and 0.6^3 = 0.216.
    """
    depth = 0
    while depth < num_steps and draw < probability ** (depth + 1):
        depth += 1
    return depth


@torch.no_grad()
def make_sure(model: Any, seed: int = 0) -> Any:
    """Make a model with random weights choose every token by a wide margin, so that rounding changes no choice.

    The next token depends on the current one only: the embedding is large compared to what the layers add, and the
    lm_head maps it to the next token. All tokens form one cycle. The cost of a forward does not change.

    Args:
        model: The model; its embedding and lm_head are overwritten.
        seed: Random seed of the cycle.

    Raises:
        InvalidConfigError: Embedding and lm_head share their weights.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding.data_ptr() == head.data_ptr():
        raise InvalidConfigError("Embedding and lm_head share their weights.", "Use tie_word_embeddings=False.")
    # redrawn as a whole, because the row of a padding token is zero
    embedding.normal_(std=SURE, generator=torch.Generator(embedding.device).manual_seed(seed))
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(seed)).to(embedding.device)
    head[order.roll(-1)] = torch.nn.functional.normalize(embedding[order].float(), dim=-1).to(head.dtype)
    return model


def measure(model: Any, inputs: Any, answer: Tensor, tau: float, nodes: int, rounds: int) -> dict[str, Any]:
    """Measure one tau and tree size on one prompt; medians over rounds with different seeds."""
    speeds, taus, diverged = [], [], []
    for seed in range(rounds + 1):  # the first round is a warm-up
        model.add_drafter(OracleDrafter(answer[None], tau, seed))
        begin = time.perf_counter()
        ids = model.generate(
            **inputs, max_new_tokens=len(answer), do_sample=False,
            speculative={"method": "oracle", "num_draft_tokens": nodes},
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        if seed:
            stats = model.last_speculation
            speeds.append((ids.shape[1] - inputs["input_ids"].shape[1]) / seconds)
            taus.append(stats.mean_accepted_length)
            diverged += stats.control["diverged_at"]
    return {"wanted_tau": tau, "nodes": nodes, "tokens_per_second": statistics.median(speeds),
            "tau": statistics.mean(taus), "diverged_at": diverged}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--prompt", default="Explain in detail how a compiler works.")
    parser.add_argument("--taus", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.5, 6.0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(options.model, None, getattr(torch, options.dtype))
    inputs, plain = loading.encode(tokenizer, options.prompt, model.device), []
    for _ in range(options.rounds + 1):
        begin = time.perf_counter()
        ids = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
        plain.append(time.perf_counter() - begin)
    answer = ids[0, inputs["input_ids"].shape[1] :]
    speed = len(answer) / statistics.median(plain[1:])
    print(f"plain: {speed:.1f} tokens/s")
    rows = []
    for nodes in options.nodes:
        for tau in options.taus:
            row = measure(model, inputs, answer, tau, nodes, options.rounds)
            row["speed_up"] = row["tokens_per_second"] / speed
            rows.append(row)
            print(f"{nodes} nodes, tau {tau:g} (measured {row['tau']:.2f}): {row['tokens_per_second']:.1f} tokens/s, "
                  f"{row['speed_up']:.2f}x plain, diverged at {row['diverged_at']}", flush=True)  # fmt: skip
    if options.json:
        record = {"environment": bench.environment(model), "prompt": options.prompt, "plain_tokens_per_second": speed,
                  "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
