"""Compare `auto` with and without a history of earlier answers: an agent loop, rollouts, unrelated questions.

    python benchmarks/histories.py --prompts questions.jsonl --json benchmarks/results/histories_cpu_bf16.json

* `agent`: calls that change one file step by step, and write the whole file each time (greedy).
* `rollouts`: several samples for each of a set of prompts at temperature 1, several epochs, one history per prompt.
* `unrelated`: different questions (greedy), where a history should cost nothing.

Both ways run in turn for each call, in one process; what is learned is kept apart. Ratios are of tokens per second of
all calls together.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from hf_specdec import bench
from hf_specdec.generation import loading
from hf_specdec.generation.state import state_of

FILE = '''class Account:
    """A bank account with an owner and a balance."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("The amount must be positive.")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("The balance is too small.")
        self.balance -= amount
        return self.balance
'''
NAMES = ("deposit", "withdraw", "owner", "balance", "amount", "Account", "positive", "small")
CHANGES = (
    "Rename {name} to new_{name}.", "Add a comment above every line that uses {name}.",
    "Add a method print_{name} that prints {name}.", "Check that {name} is not None.", "Write a test of {name}.",
)  # fmt: skip


def agent_calls(count):
    """Return the prompts of an agent: the file, the output of a tool, and the next change."""
    tool = "Tool output:\n2 tests passed, 1 failed: test_{name} (ValueError: The balance is too small.)"
    calls = []
    for number in range(count):
        name, change = NAMES[number % len(NAMES)], CHANGES[number % len(CHANGES)]
        task = f"{tool.format(name=name)}\n\n{change.format(name=name)} Write the whole file again."
        calls.append(f"Here is a file:\n```python\n{FILE}```\n{task}")
    return calls


def measure(model, tokenizer, texts, config, rows=1, epochs=1, progress="", **options):
    """Return tokens and seconds of each call without and with history, and the mean tokens per forward and row."""
    state, ways = state_of(model), {"without": {**config, "history": None}, "with": config}
    learned = dict.fromkeys(ways, state.state_dict())
    found = {way: {"tokens": [], "seconds": [], "tau": []} for way in ways}
    model.answer_history.clear()
    for epoch in range(epochs):
        for number, text in enumerate(texts):
            inputs = loading.encode(tokenizer, text, model.device)
            for way in sorted(ways, reverse=bool(number % 2)):
                state.load_state_dict(learned[way])
                torch.manual_seed(1000 * epoch + number)
                begin = time.perf_counter()
                model.generate(**inputs, speculative=ways[way], num_return_sequences=rows, **options)
                found[way]["seconds"].append(time.perf_counter() - begin)
                found[way]["tokens"].append(model.last_speculation.num_generated_tokens)
                found[way]["tau"].append(model.last_speculation.mean_accepted_length)
                learned[way] = state.state_dict()
        print(f"{progress} epoch {epoch + 1}", {way: speed(row) for way, row in found.items()}, flush=True)
    return found


def speed(row, first=0):
    """Return tokens per second from a call on."""
    return round(sum(row["tokens"][first:]) / sum(row["seconds"][first:]), 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=8, help="questions of each category, for `unrelated`")
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--scenarios", nargs="+", default=["agent", "rollouts", "unrelated"])
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, loading.default_head(None), torch.bfloat16)
    questions = bench.read_questions(options.prompts, per_category=options.per_category)
    texts = [question.turns[0] for question in questions]
    greedy = {"do_sample": False, "max_new_tokens": options.max_new_tokens}
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
               "max_new_tokens": options.max_new_tokens}  # fmt: skip
    auto = {"method": "auto", "compile": options.compile}
    for rows in {1, options.samples if "rollouts" in options.scenarios else 1}:
        model.warmup(auto, batch_size=rows)
    results, table = {}, Table("scenario", "calls", "without, tokens/s", "with", "ratio", "tau without", "with")
    for name in options.scenarios:
        if name == "agent":
            row = measure(
                model, tokenizer, agent_calls(options.calls), {**auto, "history": True}, progress=name, **greedy
            )
        elif name == "rollouts":
            row = measure(
                model, tokenizer, texts[: options.rollouts], {**auto, "history": "per_prompt"}, rows=options.samples,
                epochs=options.epochs, progress=name, **sampled,
            )  # fmt: skip
        else:
            row = measure(model, tokenizer, texts, {**auto, "history": True}, progress=name, **greedy)
        ratio = speed(row["with"]) / speed(row["without"])
        taus = [sum(row[way]["tau"]) / len(row[way]["tau"]) for way in ("without", "with")]
        results[name] = {**row, "ratio": round(ratio, 3)}
        speeds = [f"{speed(row[way]):.1f}" for way in ("without", "with")]
        table.add_row(
            name, str(len(row["with"]["tokens"])), *speeds, f"{ratio:.2f}", *(f"{tau:.2f}" for tau in taus)
        )  # fmt: skip
    Console(width=140).print(table)
    if options.json is not None:
        record = {"environment": bench.environment(model), "max_new_tokens": options.max_new_tokens,
                  "compile": options.compile, "samples": options.samples, "epochs": options.epochs,
                  "scenarios": results}  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
