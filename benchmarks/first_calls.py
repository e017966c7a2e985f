"""Time `attach` and the first three calls of a process, beside plain `generate()` in another process.

python benchmarks/first_calls.py MODEL --dtype float32 --max-new-tokens 64             one JSON line: auto
python benchmarks/first_calls.py MODEL --dtype float32 --max-new-tokens 64 --plain     the same calls, plainly

Run each line in a new process on an idle machine. A kept verdict makes `attach` faster: delete
`$HF_HOME/hf-specdec/verdicts` to time the first `attach` on a machine.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import SpeculativeGenerationMixin

QUESTIONS = (
    "Write a Python function that merges two sorted lists into one sorted list, and explain it.",
    "How do I reverse a linked list in C? Show code.",
    "Explain the difference between a process and a thread.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    row = {"model": arguments.model, "dtype": arguments.dtype, "seconds": [], "tokens": []}
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    if not arguments.plain:
        begin = time.perf_counter()
        SpeculativeGenerationMixin.attach(model)
        row["attach_seconds"] = round(time.perf_counter() - begin, 2)
        options["speculative"] = "auto"
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        begin = time.perf_counter()
        ids = model.generate(**inputs, **options)
        row["seconds"].append(round(time.perf_counter() - begin, 2))
        row["tokens"].append(ids.shape[1] - inputs["input_ids"].shape[1])
    print(json.dumps(row))


if __name__ == "__main__":
    main()
