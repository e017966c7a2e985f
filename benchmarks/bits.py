"""Compare every bit: ids and logits of drafted answers with those of plain decoding, both with the CPU kernels.

    python benchmarks/bits.py --prompts questions.jsonl --json benchmarks/results/bits_cpu.json

`plain` is `{"method": "plain", "compile": "kernels"}`, one row at a time. Each method answers in batches of every size
with left padding. Logits are compared up to the first token that differs. Instruction sets and threads (one and two)
have a process each; within an instruction set, the answers of both processes are compared as well.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from batches import padded

from hf_specdec import bench
from hf_specdec.cpu import library
from hf_specdec.generation import loading

METHODS = ["auto", "eagle", "medusa", "dflash", "prompt_lookup", "token_recycling", "lookahead"]


def answers(model, tokenizer, questions, method, new_tokens):
    """Return the ids of each answer up to its EOS, and their logits."""
    inputs = padded(tokenizer, questions, model.device)
    made = model.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True,
        speculative={"method": method, "compile": "kernels", "exact": True},
    )  # fmt: skip
    found, logits = [], torch.stack(made.logits, dim=1)
    for row, ids in enumerate(made.sequences[:, inputs["input_ids"].shape[1] :].tolist()):
        eos = tokenizer.eos_token_id
        end = ids.index(eos) + 1 if eos in ids else len(ids)
        found.append((ids[:end], logits[row, :end].clone()))
    return found


def compare(found, plain):
    """Return whether ids differ, and of how many logits, of those up to the first difference, some bit differs."""
    pairs = enumerate(zip(found[0], plain[0], strict=False))
    same = next((place for place, (one, other) in pairs if one != other), len(plain[0]) - 1)
    differing = sum(not torch.equal(one, other) for one, other in zip(found[1][: same + 1], plain[1], strict=False))
    return found[0] != plain[0], differing, same + 1


@torch.no_grad()
def measure(options):
    """Measure with this process's instruction set; print the results as a JSON line."""
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, None, getattr(torch, options.dtype))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for head in ("medusa", "dflash"):
        model.load_drafter(Path(__file__).parents[1] / "heads" / f"smollm2-135m-instruct-{head}")
    questions = bench.read_questions(options.prompts)
    questions = questions[:: max(1, len(questions) // options.questions)][: options.questions]
    plain = [answers(model, tokenizer, [one], "plain", options.max_new_tokens)[0] for one in questions]
    rows = []
    for method in options.methods:
        for size in options.sizes:
            found = []
            for first in range(0, len(questions), size):
                found += answers(model, tokenizer, questions[first : first + size], method, options.max_new_tokens)
            different = [compare(*pair) for pair in zip(found, plain, strict=True)]
            ids, logits, tokens = (sum(column) for column in zip(*different, strict=True))
            rows.append({"method": method, "rows": size, "answers": len(found), "tokens": tokens, "ids_differ": ids,
                         "logits_differ": logits})  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    digest = hashlib.sha256(b"".join(logits.float().numpy().tobytes() for _, logits in plain)).hexdigest()
    document = {"instructions": library.load_library()[0].name, "threads": options.threads, "dtype": options.dtype}
    print(json.dumps({**document, "plain": digest, "environment": bench.environment(model), "rows": rows}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--sets", nargs="+", default=["avx512_bf16", "avx2"], help="instruction sets")
    parser.add_argument("--threads", type=int, help="measure in this process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        measure(options)
        return
    documents = []
    for name in options.sets:
        for threads, methods in ((2, options.methods), (1, ["auto"])):
            command = [sys.executable, __file__, *sys.argv[1:], "--threads", str(threads), "--methods", *methods]
            done = subprocess.run(
                command, env={**os.environ, library.VARIABLE: name}, stdout=subprocess.PIPE, text=True, check=True
            )
            documents.append(json.loads(done.stdout.splitlines()[-1]))
        same = documents[-1]["plain"] == documents[-2]["plain"]
        print(f"{name}: plain answers of two processes, with two threads and one, are {'' if same else 'NOT '}equal")
    options.json.write_text(json.dumps(documents, indent=1))


if __name__ == "__main__":
    main()
