"""Measure how far the lossy acceptance rules (typical, nucleus) deviate from the model's distribution.

    python benchmarks/lossy.py --prompts questions.jsonl --json benchmarks/results/lossy_cpu_bf16.json

Sampling: the mean over all tokens of the total variation distance. A draft token that a lossy rule accepts is certain,
while the model chooses it with probability p: distance 1 - p. All other tokens are drawn from the model: distance 0.
Greedy: the number of tokens before the first that differs from plain.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
import transformers

from hf_specdec import bench
from hf_specdec.generation import loading

RULES = ("auto", "typical", "nucleus")


@torch.no_grad()
def probabilities(model, sequence, prompt_length, temperature):
    """Return the model's probability of every generated token."""
    logits = model(input_ids=sequence[None]).logits[0, prompt_length - 1 : -1].float() / temperature
    return logits.softmax(-1).gather(-1, sequence[prompt_length:, None])[:, 0]


def kept_drafts(stats, num_tokens):
    """Mark accepted draft tokens; the prefill's token and the last token of each step are drawn from the model."""
    kept = [False]
    for count in stats.accepted_per_step[0]:
        kept += [True] * (count - 1) + [False]
    return torch.tensor(kept[:num_tokens])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--longest-prompt", type=int, default=400)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, None, torch.bfloat16)
    questions = [q for q in bench.read_questions(options.prompts) if len(q.turns[0]) <= options.longest_prompt]
    questions = questions[:: max(1, len(questions) // options.questions)][: options.questions]
    results = []
    for sampled in (False, True):
        for rule in RULES:
            rows = []
            for seed, question in enumerate(questions):
                inputs = loading.encode(tokenizer, question.turns[0], model.device)
                length = inputs["input_ids"].shape[1]
                how = {"max_new_tokens": options.max_new_tokens, "do_sample": sampled}
                if sampled:
                    how |= {"temperature": options.temperature, "top_k": 0, "top_p": 1.0}
                plain = model.generate(**inputs, **how)[0] if not sampled else None
                torch.manual_seed(seed)
                answer = model.generate(**inputs, **how, speculative={"method": "eagle", "acceptance": rule})[0]
                stats = model.last_speculation
                p = probabilities(model, answer, length, options.temperature if sampled else 1.0)
                kept = kept_drafts(stats, len(p)) if rule != "auto" else torch.zeros(len(p), dtype=torch.bool)
                same = 0
                if plain is not None:
                    shorter = min(len(plain), len(answer))
                    differ = (plain[:shorter] != answer[:shorter]).nonzero()
                    same = (int(differ[0]) if len(differ) else shorter) - length
                rows.append((stats.mean_accepted_length, float(((1 - p) * kept).mean()), float(p.log().mean()), same))
            tau, distance, likelihood, same = zip(*rows, strict=True)
            results.append({
                "do_sample": sampled, "acceptance": rule, "tau": round(statistics.mean(tau), 2),
                "mean_total_variation_per_token": round(statistics.mean(distance), 3) if sampled else None,
                "mean_log_probability_per_token": round(statistics.mean(likelihood), 3),
                "mean_tokens_equal_to_plain": round(statistics.mean(same), 1) if not sampled else None,
            })  # fmt: skip
            print(results[-1], flush=True)
    record = {
        "environment": bench.environment(model), "questions": len(questions),
        "max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "rules": results,
    }  # fmt: skip
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
