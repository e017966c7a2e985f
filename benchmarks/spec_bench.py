"""Write the development half of Spec-Bench: the 240 questions with odd ids, every second one of each category.

    curl -LO URL    # of `SOURCE`; also in docs/benchmarks/results.md
    python benchmarks/spec_bench.py question.jsonl spec_bench_dev.jsonl

The tables of `docs/benchmarks/` are measured with these questions. They are not part of this repository, because they
come from MT-bench, WMT14, CNN/DM, Natural Questions and GSM8K, each under its own licence: measure with them, do not
train on them.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

SOURCE = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/"
    "fd2c1cd7d2201ef71db4c5f4e455008f017967bf/data/spec_bench/question.jsonl"
)
"""Spec-Bench's questions at the commit that was measured."""

SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
"""Digest of the file at `SOURCE`."""


def development_half(text):
    """Return the lines of the questions with odd ids."""
    questions = [json.loads(line) for line in text.splitlines()]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in questions if row["question_id"] % 2)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("output", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    if not options.questions.is_file():
        sys.exit(f"There is no file {options.questions}: download it from {SOURCE}.")
    content = options.questions.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        sys.exit(f"{options.questions} is not the file that was measured: download that from {SOURCE}.")
    options.output.write_text(development_half(content.decode()), encoding="utf-8")


if __name__ == "__main__":
    main()
