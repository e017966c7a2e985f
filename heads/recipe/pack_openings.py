"""Cut packed answers after their first tokens, and keep all of them or some, chosen at random.

    python heads/recipe/pack_openings.py WORK/openings.parquet heads/data/answers.parquet

The beginning of an answer is harder to predict than the rest, see the card of the EAGLE-3 head. Conversations of which
more than `--longest` tokens would be left, or whose answer has fewer than `--shortest`, are dropped.
"""

import argparse
from pathlib import Path

import datasets
import numpy as np


def opening(row, answer_tokens):
    """Return a row cut after its first `answer_tokens` answer tokens."""
    answers = [place for place, is_answer in enumerate(row["loss_mask"]) if is_answer]
    end = answers[:answer_tokens][-1] + 1
    return {**row, "input_ids": row["input_ids"][:end], "loss_mask": row["loss_mask"][:end]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--shortest", type=int, default=8, help="answer tokens")
    parser.add_argument("--longest", type=int, default=640, help="tokens after the cut, prompt included")
    parser.add_argument("--count", type=int, help="conversations to keep; default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = datasets.load_dataset("parquet", data_files=str(options.answers), split="train")
    cut = [opening(row, options.answer_tokens) for row in rows if sum(row["loss_mask"]) >= options.shortest]
    fitting = [row for row in cut if len(row["input_ids"]) <= options.longest]
    chosen = sorted(np.random.default_rng(options.seed).permutation(len(fitting))[: options.count])
    kept = [fitting[number] for number in chosen]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(kept, features=rows.features).to_parquet(options.output)
    print(f"{len(kept)} of {len(rows)} conversations, {sum(sum(row['loss_mask']) for row in kept)} answer tokens")


if __name__ == "__main__":
    main()
