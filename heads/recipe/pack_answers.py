"""Pack distilled answers into one small file with token ids, masks and sources, but no text.

    python heads/recipe/pack_answers.py heads/data/answers.parquet data/articles data/prompts older.jsonl.gz

Each input is the output of `hf-specdec distill`, or JSON lines with `prompt_ids` and `response_ids`. Duplicate
conversations are kept once, and answers at temperatures above `--hottest` are dropped. Prints counts by source.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import datasets
from pyarrow import parquet

from hf_specdec.training.conversations import load_rows


def read(place):
    """Yield rows of `source, temperature, input_ids, loss_mask`."""
    for row in load_rows(place):
        if "input_ids" not in row:
            prompt, answer = row["prompt_ids"], row["response_ids"]
            row["input_ids"], row["loss_mask"] = [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
        yield {name: row[name] for name in ("source", "temperature", "input_ids", "loss_mask")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("places", nargs="+")
    parser.add_argument("--hottest", type=float, default=0.7)
    options = parser.parse_args()
    rows, counts = {}, defaultdict(lambda: [0, 0, 0])
    for place in options.places:
        for row in read(place):
            key = tuple(row["input_ids"])
            if key in rows or round(row["temperature"], 3) > options.hottest:
                continue
            rows[key] = row
            count = counts[row["source"]]
            count[0], count[1], count[2] = count[0] + 1, count[1] + sum(row["loss_mask"]), count[2] + len(key)
    features = datasets.Features({
        "source": datasets.Value("string"), "temperature": datasets.Value("float32"),
        "input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("bool")),
    })  # fmt: skip
    columns = {name: [row[name] for row in rows.values()] for name in features}
    table = datasets.Dataset.from_dict(columns, features=features).data.table
    options.output.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, options.output, compression="zstd", compression_level=19)
    print("| source | conversations | answer tokens | all tokens |\n|---|---|---|---|")
    for source, count in [
        *sorted(counts.items()),
        ("all", [sum(column) for column in zip(*counts.values(), strict=True)]),
    ]:
        print(f"| {source} | " + " | ".join(f"{number:,}" for number in count) + " |")


if __name__ == "__main__":
    main()
