"""A drafter that replays a known answer at a chosen acceptance, so that speed shows at any tau without a head.

    python benchmarks/oracle.py --taus 1 2 3 4.5 6 --nodes 16 32 --json benchmarks/results/oracle_cpu_bf16.json

Drafting costs next to nothing, verification what it costs always: tokens/s at a tau is what a perfect drafter of that
tau would reach. As a module it brings `OracleDrafter`, and `make_sure` for models of random weights.
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
"""Multiples of it, modulo 1, cover the unit interval more evenly than random numbers do."""

SURE = 100.0
"""Root mean square of a sure model's embedding: what its layers add to it is small beside that."""


class OracleDrafter(Drafter):
    """Drafts trees that hold the true continuation down to a drawn depth; all other tokens are wrong.

    The depth d is drawn so that it is at least k with probability p^k, up to the depth of the tree, and on average
    tau - 1. Draws are spread evenly (multiples of the golden ratio), so that few steps have the wanted mean already;
    a seed says where they begin. Where the answer ends within the true part, fewer tokens are accepted.

    Config fields: `num_draft_tokens` nodes (default 16), `num_steps` the depth of the tree (default 2.5 times what is
    accepted on average, at least 4).

    Args:
        answers: `[B, T]` plain `generate()`'s new tokens, of the very prompts that will be given. In half precision a
            tree's forward may choose another token than plain's at a near tie; from there on nothing is accepted, and
            `report` tells where. `make_sure` makes a random model without near ties.
        tau: Tokens per target forward that are wanted, 1 or more.
        seed: Of all draws.
    """

    method = "oracle"

    def __init__(self, answers: Tensor, tau: float, seed: int = 0) -> None:
        if not tau >= 1:
            raise InvalidConfigError(f"Every forward yields a token, got tau={tau!r}.", "Give 1 or more.")
        self.answers, self.tau, self.seed = answers.tolist(), tau, seed

    def limits(self, config: SpeculativeConfig) -> Budget:
        """The tree of every step.

        Raises:
            InvalidConfigError: It is too shallow for the wanted tau, or a tree is given.
        """
        if config.tree is not None:
            raise InvalidConfigError(f"The oracle makes its trees itself, got tree={config.tree!r}.", "Leave it out.")
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
        """Replay from the first token.

        Raises:
            InvalidConfigError: The prompts are not as many as the answers.
        """
        if len(self.answers) != len(context.roots):
            raise InvalidConfigError(
                f"The oracle knows {len(self.answers)} answers, and the batch has {len(context.roots)} rows.",
                "Make one for these prompts.",
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
        """Where each row's answer was no longer the known one; None where it always was."""
        return {"diverged_at": list(self._diverged)}

    def _tree(self, row: int, budget: Budget) -> tuple[list[int], list[int]]:
        """Tokens and parents: on every level the children of one node, of which one is right down to a drawn depth."""
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
    """How many nodes each level has; the root is not counted, and upper levels have those that are left over.

    Example: 16 nodes on 4 levels are [4, 4, 4, 3].
    """
    each, more = divmod(num_nodes - 1, num_steps) if num_steps else (0, 0)
    return [width for level in range(num_steps) if (width := each + (level < more))]


def acceptance_for(tau: float, num_steps: int) -> float:
    """The probability p of one more right token with which p + p^2 + ... + p^num_steps is tau - 1.

    Example: tau 2.75 over 2 levels is 0.9142 (0.9142 + 0.8358); tau 3 over 2 levels is 1.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        reached = sum(middle**depth for depth in range(1, num_steps + 1))
        low, high = (middle, high) if reached < tau - 1 else (low, middle)
    return high


def drawn_depth(draw: float, probability: float, num_steps: int) -> int:
    """The depth that a number in [0, 1) means: at least k where it is below probability^k.

    Example: 0.3 with probability 0.6 is depth 2, for 0.6^2 = 0.36 and 0.6^3 = 0.216.
    """
    depth = 0
    while depth < num_steps and draw < probability ** (depth + 1):
        depth += 1
    return depth


@torch.no_grad()
def make_sure(model: Any, seed: int = 0) -> Any:
    """Make a model of random weights sure of its choices, so that rounding changes none of them.

    After a token comes one that depends on it alone, by a wide margin: the embedding is large beside what the layers
    add, and the lm_head finds it again. All tokens lie on one cycle. What a forward costs stays.

    Args:
        model: Written to: its embedding and its lm_head.
        seed: Of the cycle.

    Raises:
        InvalidConfigError: Embedding and lm_head share their weights.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding.data_ptr() == head.data_ptr():
        raise InvalidConfigError("Embedding and lm_head share their weights.", "Use tie_word_embeddings=False.")
    # drawn anew: the row of a padding token is zero
    embedding.normal_(std=SURE, generator=torch.Generator(embedding.device).manual_seed(seed))
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(seed)).to(embedding.device)
    head[order.roll(-1)] = torch.nn.functional.normalize(embedding[order].float(), dim=-1).to(head.dtype)
    return model


def measure(model: Any, inputs: Any, answer: Tensor, tau: float, nodes: int, rounds: int) -> dict[str, Any]:
    """One tau and one size of tree on one prompt; medians over rounds that differ in their seed."""
    speeds, taus, diverged = [], [], []
    for seed in range(rounds + 1):  # the first is a warm-up
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
