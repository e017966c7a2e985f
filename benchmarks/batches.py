"""Compare batches of 1 to 16 prompts with plain `generate()` of the same batch: speed and tokens per forward and row.

    python benchmarks/batches.py --prompts questions.jsonl --json benchmarks/results/batches_cpu_bf16.json

Greedy, chat template, left padding; methods are interleaved per batch. Ratios are of medians over batches of tokens
per second; tokens after a row's EOS are not counted. `+kernels` runs a method with the CPU kernels, otherwise it runs
eagerly; `plain+kernels` decodes plainly through this package's loop.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers

from hf_specdec import bench
from hf_specdec.generation import loading


def config_of(method):
    """Return the value of `speculative=` for a method with or without the suffix `+kernels`."""
    name, _, form = method.partition("+")
    return {"method": name, "compile": form or "none"}


def padded(tokenizer, questions, device):
    rows = [loading.encode(tokenizer, question.turns[0], device)["input_ids"][0] for question in questions]
    width = max(map(len, rows))
    ids = torch.stack(
        [torch.nn.functional.pad(row, (width - len(row), 0), value=tokenizer.pad_token_id) for row in rows]
    )
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    return {"input_ids": ids, "attention_mask": mask.to(device)}


def generated(answer, prompt_length, eos_token_id):
    """Count the tokens of all rows up to and including the EOS."""
    rows = answer[:, prompt_length:].tolist()
    return sum(row.index(eos_token_id) + 1 if eos_token_id in row else len(row) for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--longest-prompt", type=int, default=400, help="characters; long prompts measure the prefill")
    parser.add_argument("--methods", nargs="+", default=["auto", "plain+kernels", "auto+kernels"])
    parser.add_argument("--head", type=Path, help="a head for `eagle` and `auto`")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, options.head, torch.bfloat16)
    merged = ["prompt_lookup", "token_recycling", *model.drafters]
    questions = [q for q in bench.read_questions(options.prompts) if len(q.turns[0]) <= options.longest_prompt]
    step = max(1, len(questions) // options.questions)
    questions = questions[::step][: options.questions]
    eos = model.generation_config.eos_token_id
    results = []
    for size in options.sizes:
        batches = [questions[i : i + size] for i in range(0, len(questions), size)]
        speeds, taus, plain_steps, arms = {}, {}, {}, {}
        for number, batch in enumerate([batches[0], *batches]):
            inputs = padded(tokenizer, batch, model.device)
            for method in (None, *options.methods):
                config = None if method is None else config_of(method)
                if method is not None and config["method"] == "auto":
                    config["methods"] = merged
                begin = time.perf_counter()
                answer = model.generate(
                    **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=config
                )
                seconds = time.perf_counter() - begin
                if number:  # the first batch is a warm-up
                    tokens = generated(answer, inputs["input_ids"].shape[1], eos)
                    speeds.setdefault(method, []).append(tokens / seconds)
                    if method:
                        stats = model.last_speculation
                        taus.setdefault(method, []).append(stats.mean_accepted_length)
                        plain_steps.setdefault(method, []).append(stats.control.get("plain_steps", 0.0))
                        arms.setdefault(method, []).append(stats.control.get("tokens_per_second"))
        plain = statistics.median(speeds[None])
        row = {"batch_size": size, "batches": len(batches), "plain_tokens_per_second": round(plain, 2)}
        for method in options.methods:
            row[method] = {
                "ratio": round(statistics.median(speeds[method]) / plain, 3),
                "ratio_per_batch": [round(a / b, 2) for a, b in zip(speeds[method], speeds[None], strict=True)],
                "tau": round(statistics.mean(taus[method]), 2),
                "plain_steps": round(statistics.mean(plain_steps[method]), 2),
                "tokens_per_second": [round(speed, 2) for speed in speeds[method]],
                "arms": arms[method],
            }
        ratios = {name: (row[name]["ratio"], min(row[name]["ratio_per_batch"])) for name in options.methods}
        print(size, f"plain {plain:.1f} tokens/s; median and worst ratio:", ratios, flush=True)
        results.append(row)
        record = {"environment": bench.environment(model), "max_new_tokens": options.max_new_tokens, "sizes": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
