"""Measure the shipped EAGLE-3 head on long prompts: accept length, time of drafting and of the first token.

    python benchmarks/long_texts.py --prompts questions.jsonl --json benchmarks/results/long_texts_cpu_bf16.json

A prompt is a text of passages (of `rag` and `summarization`), cut to the wanted number of tokens, and a question of
`qa` at its end. Greedy, batch size 1, all rows interleaved per prompt in one process. `window` is `draft_window` in
tokens, `all` a window that is longer than any text. Every finished prompt is written to the JSON file, and an
interrupted run resumes. `milliseconds` is the median time of a draft but the first, in which the head reads the prompt
(`first_draft_seconds`); `other_cores` counts the cores that other processes used.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from hf_specdec import SpeculativeGenerationMixin, bench
from hf_specdec.bench.machine import OtherProcesses
from hf_specdec.cli.training_run import load_training_target
from hf_specdec.generation import loading

ALL = 2**20
"""A window longer than any prompt."""
PASSAGES = ("rag", "summarization")
"""Categories of the texts before the question."""
TIMES = ("milliseconds", "first_draft_seconds", "prefill_seconds", "plain_first_token_seconds")
"""Columns whose medians are shown."""


def long_prompt(tokenizer, passages, question, length):
    """Return a message that makes a prompt of about `length` tokens: passages, then the question."""
    room = length - len(loading.encode(tokenizer, f"\n\n{question}", "cpu")["input_ids"][0])
    tokens = tokenizer("\n\n".join(passages), add_special_tokens=False)["input_ids"]
    return f"{tokenizer.decode(tokens[:room])}\n\n{question}"


def first_token_seconds(model, inputs):
    """Return the seconds until transformers' plain `generate()` emits its first token."""
    begin = time.perf_counter()
    model.generate(**inputs, max_new_tokens=1, do_sample=False)
    return time.perf_counter() - begin


def measure(model, inputs, window, options):
    """Return the figures of one answer."""
    config = {"method": "eagle", "draft_window": window, "compile": options.compile, "trace": True}
    chunk = {} if options.chunk is None else {"prefill_chunk_size": options.chunk}
    others = OtherProcesses()
    output = model.generate(
        **inputs, max_new_tokens=options.max_new_tokens, min_new_tokens=options.max_new_tokens, do_sample=False,
        speculative=config, **chunk,
    )  # fmt: skip
    stats = model.last_speculation
    first, *drafts = [step.draft_seconds for step in stats.trace]
    return {
        "answer": output[0, inputs["input_ids"].shape[1] :].tolist(), "tau": round(stats.mean_accepted_length, 4),
        "steps": stats.num_target_forwards, "milliseconds": round(1000 * statistics.median(drafts), 3),
        "first_draft_seconds": round(first, 4), "draft_seconds": round(stats.draft_seconds, 4),
        "prefill_seconds": round(stats.prefill_seconds, 4), "other_cores": others.cores(),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--head", type=Path, default=Path(__file__).parents[1] / "heads/smollm2-135m-instruct-eagle3")
    parser.add_argument("--count", type=int, default=12, help="prompts per length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096, 8064])
    parser.add_argument("--windows", type=int, nargs="+", default=[1536, 768, 384])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--chunk", type=int, help="prefill_chunk_size")
    parser.add_argument("--compile", default="none")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    target, tokenizer = load_training_target(None, "bfloat16")
    model = SpeculativeGenerationMixin.attach(target)
    model.load_drafter(options.head, name="eagle")
    questions = bench.read_questions(options.prompts)
    passages = [one.turns[0] for one in questions if one.category in PASSAGES]
    asked = [one.turns[0] for one in questions if one.category == "qa"][: options.count]
    record = json.loads(options.json.read_text()) if options.json.exists() else {"rows": []}
    settings = {"max_new_tokens": options.max_new_tokens, "chunk": options.chunk, "compile": options.compile}
    if record["rows"] and record["settings"] != settings:
        raise SystemExit(f"{options.json} has other settings: {record['settings']}.")
    record |= {"environment": bench.environment(model), "settings": settings}
    done = {(row["length"], row["number"]) for row in record["rows"]}
    for number, question in enumerate(asked):
        first = number * len(passages) // len(asked)
        for length in options.lengths:
            if (length, number) in done:
                continue
            text = long_prompt(tokenizer, [*passages[first:], *passages[:first]], question, length)
            inputs = loading.encode(tokenizer, text, model.device)
            plain = round(first_token_seconds(model, inputs), 4)
            for window in (None, *options.windows):
                figures = measure(model, inputs, window or ALL, options)
                record["rows"].append({
                    "length": length, "number": number, "tokens": inputs["input_ids"].shape[1],
                    "window": window or "all", "plain_first_token_seconds": plain, **figures,
                })  # fmt: skip
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    show(record["rows"])


def show(rows):
    """Print means by length and window."""
    table = Table("tokens", "window", "tau", "ms per draft", "first draft, s", "prefill s", "plain first token, s")
    for length, window in dict.fromkeys((row["length"], row["window"]) for row in rows):
        chosen = [row for row in rows if (row["length"], row["window"]) == (length, window)]
        medians = [f"{statistics.median(row[name] for row in chosen):.2f}" for name in TIMES]
        table.add_row(str(length), str(window), f"{statistics.mean(row['tau'] for row in chosen):.2f}", *medians)
    Console(width=140).print(table)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
