"""Requests that wait for one model on a CPU: one after another, in four threads, or in batches.

    python benchmarks/waiting_requests.py MODEL --json benchmarks/results/waiting_requests_cpu.json

MODEL is a directory with `model.gguf` and `hf/`, as in `quantized.py`. Eight questions of `code_prompts.jsonl` wait at
the same time. Each way and method runs in a process of its own, so that none drafts from the answers of another.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_specdec import SpeculativeGenerationMixin, load_gguf
from hf_specdec.bench.machine import versions

QUESTIONS = Path(__file__).parent / "code_prompts.jsonl"
WAYS = {"one after another": (1, 1), "4 threads": (4, 1), "batches of 4": (1, 4), "a batch of 8": (1, 8)}
"""Threads, and requests of a call."""


def work(way, method, options):
    """Print tokens, seconds in all, and the mean of the seconds after which a request was answered."""
    (threads, size), config = WAYS[way], {"method": method, "compile": "kernels"}
    tokenizer = AutoTokenizer.from_pretrained(options.model / "hf", padding_side="left")
    model = load_gguf(options.model / "model.gguf", dtype=torch.bfloat16, round_activations=True)
    model = SpeculativeGenerationMixin.attach(model)
    model.warmup(config, batch_size=size)
    texts = [json.loads(line)["turns"][0] for line in QUESTIONS.read_text().splitlines()][:8]
    chats = [[{"role": "user", "content": text}] for text in texts]

    def answer(chats):
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        ids = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=config)
        tokens = ids[:, inputs["input_ids"].shape[1] :] != tokenizer.pad_token_id
        return int(tokens.sum()), time.perf_counter() - begin

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        answered = list(pool.map(answer, [chats[first : first + size] for first in range(0, len(chats), size)]))
    tokens, ends = zip(*answered, strict=True)
    print(json.dumps({"way": way, "method": method, "tokens": sum(tokens), "seconds": max(ends),
                      "mean_wait": sum(ends) / len(ends)}))  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(*options.worker, options)
    rows = []
    for way in WAYS:
        for method in ("plain", "auto"):
            command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--worker", way, method]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            row = rows[-1]
            print(f"| {way} | {method} | {row['tokens'] / row['seconds']:.1f} | {row['mean_wait']:.1f} |", flush=True)
    if options.json:
        facts = {"environment": versions(torch.device("cpu")), "options": sys.argv[1:]}
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
