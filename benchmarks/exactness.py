"""Measure exactness on a real model: greedy equality, equality per seed, the sampled distribution, and memory.

    python benchmarks/exactness.py --prompts questions.jsonl --json benchmarks/results/exactness.json

Takes about 30 minutes on two cores.
"""

import argparse
import json
import random
import resource
from collections import Counter
from pathlib import Path

import torch
import transformers

from hf_specdec import bench
from hf_specdec.generation import loading

METHODS = {
    "auto": {"method": "auto"},
    "eagle": {"method": "eagle"},
    "prompt_lookup": {"method": "prompt_lookup"},
}


def greedy(model, tokenizer, questions, new_tokens):
    """Count equal answers per method; for the others, return the gap of plain's two highest logits."""
    rows = bench.measure(model, tokenizer, questions, list(METHODS), max_new_tokens=new_tokens, settings=METHODS)
    result = {name: {"equal": 0, "of": 0, "tau": [], "gaps": []} for name in METHODS}
    for row in rows:
        if row.method == "plain":
            continue
        entry = result[row.method]
        entry["of"] += 1
        entry["equal"] += row.ids_equal
        entry["tau"].append(row.tau)
        if not row.ids_equal:
            entry["gaps"].append([row.question_id, row.first_difference, row.top_two_gap])
        if row.method == "prompt_lookup":
            print(row.question_id, row.category, {n: (e["equal"], e["of"]) for n, e in result.items()}, flush=True)
    for entry in result.values():
        entry["tau"] = sum(entry["tau"]) / len(entry["tau"])
    return result


def seeds(model, tokenizer, questions, new_tokens):
    """Count sampled answers that equal plain's for the same seed."""
    result = {}
    for temperature, top_p, top_k in ((0.7, 0.9, 50), (1.0, 0.95, 100)):
        equal = Counter()
        for seed, question in enumerate(questions):
            inputs = loading.encode(tokenizer, question.turns[0], model.device)
            answers = {}
            for name, speculative in ({"plain": None} | METHODS).items():
                torch.manual_seed(seed)
                answers[name] = model.generate(
                    **inputs, max_new_tokens=new_tokens, do_sample=True, temperature=temperature, top_p=top_p,
                    top_k=top_k, speculative=speculative,
                )  # fmt: skip
            for name in METHODS:
                equal[name] += torch.equal(answers["plain"], answers[name])
        result[f"temperature {temperature}, top_p {top_p}, top_k {top_k}"] = dict(equal) | {"of": len(questions)}
        print(result, flush=True)
    return result


def distribution(model, tokenizer, draws):
    """Chi-square test of three sampled tokens against the model's exact probabilities.

    The tokens are sampled through EAGLE trees in batches. The exact probability of a triple is the product of the
    conditional probabilities; triples with fewer than 5 expected draws are combined into one cell.
    """
    inputs = loading.encode(tokenizer, "Name a colour and an animal.", model.device)
    length, batch = inputs["input_ids"].shape[1], 50
    options = {"do_sample": True, "temperature": 1.0, "top_k": 8, "max_new_tokens": 3, "speculative": "eagle"}
    torch.manual_seed(0)
    counts = Counter()
    for _ in range(draws // batch):
        ids = model.generate(**{k: v.expand(batch, -1) for k, v in inputs.items()}, **options)
        counts.update(tuple(row) for row in ids[:, length:].tolist())

    @torch.no_grad()
    def conditionals(prefix):
        ids = torch.cat([inputs["input_ids"], torch.tensor([prefix], dtype=torch.long)], dim=-1)
        logits = model(input_ids=ids).logits[0, -1].double()
        top = logits.topk(8)
        return dict(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))

    exact = {}
    for a, pa in conditionals([]).items():
        for b, pb in conditionals([a]).items():
            for c, pc in conditionals([a, b]).items():
                exact[a, b, c] = pa * pb * pc
    total = sum(counts.values())
    common = {key: p for key, p in exact.items() if total * p >= 5}
    rest, seen = 1 - sum(common.values()), total - sum(counts[key] for key in common)
    value = sum((counts[key] - total * p) ** 2 / (total * p) for key, p in common.items())
    value += (seen - total * rest) ** 2 / (total * rest)
    impossible = sum(count for key, count in counts.items() if key not in exact)
    degrees = len(common)
    return {"draws": total, "cells": degrees + 1, "chi_square": value, "degrees_of_freedom": degrees,
            "standard_deviations_above_mean": (value - degrees) / (2 * degrees) ** 0.5,
            "impossible_outcomes": impossible}  # fmt: skip


def memory(model, tokenizer, calls):
    """Compare resident memory after 8 calls and after all, with prompts and answers of varying length."""
    rng, peaks, caches = random.Random(0), [], []
    vocabulary = model.config.get_text_config().vocab_size
    for call in range(calls):
        ids = torch.randint(3, vocabulary, (1, 300 if call < 4 else rng.randint(5, 300)))
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32 if call < 4 else rng.randint(1, 32),
            do_sample=False, eos_token_id=None, speculative="eagle" if call % 2 else "prompt_lookup",
        )  # fmt: skip
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        caches.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20)
    return {"calls": calls, "peak_mib_after_8": peaks[7], "peak_mib_after_all": peaks[-1],
            "resident_mib_after_8": caches[7], "resident_mib_after_all": caches[-1]}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--parts", default="greedy,half,seeds,distribution,memory")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--part-of", default="0:1", help="I:N runs every Nth question from the Ith (for N processes)")
    parser.add_argument("--seed-questions", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    first, every = map(int, options.part_of.split(":"))
    questions = bench.read_questions(options.prompts, limit=options.questions)[first::every]
    document = json.loads(options.json.read_text()) if options.json.exists() else {}
    for part in options.parts.split(","):
        dtype = torch.bfloat16 if part == "half" else torch.float32
        model, tokenizer = loading.load_model(None, options.drafter, dtype)
        document[part] = {
            "greedy": lambda m, t: greedy(m, t, questions, options.max_new_tokens),
            "half": lambda m, t: greedy(m, t, questions, options.max_new_tokens),
            "seeds": lambda m, t: seeds(m, t, questions[: options.seed_questions], 32),
            "distribution": lambda m, t: distribution(m, t, 4000),
            "memory": lambda m, t: memory(m, t, 200),
        }[part](model, tokenizer)
        document["environment"] = bench.environment(model) | {"dtype": "float32; half: bfloat16"}
        print(part, document[part], flush=True)
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
