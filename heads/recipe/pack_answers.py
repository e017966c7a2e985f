"""Pack distilled answers into one small file with token ids, masks and sources, but no text.

    python heads/recipe/pack_answers.py all.parquet WORK/tasks WORK/readings WORK/chats
    python heads/recipe/pack_answers.py heads/data/answers.parquet all.parquet --ship

Each input is the output of `hf-specdec distill`, or JSON lines with `prompt_ids` and `response_ids`. Duplicate
conversations are kept once, and answers at temperatures above `--hottest` are dropped. `--ship` drops what this
repository cannot ship with a notice: conversations under other licences than `SHIPPED`, and prompts of more than 100
tokens of self-instruct, many of which quote texts of others. Prints counts by source and licence.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import datasets
from pyarrow import parquet

from hf_specdec.training.data import read_rows

OURS = ("coding", "comparing", "explaining", "listing", "math", "question", "roleplay", "writing", "translation",
        "invented", "self-prompted")  # fmt: skip
LICENCES = {
    **dict.fromkeys(OURS, "Apache-2.0"),
    "answers": "Apache-2.0 AND MIT",  # the target's own, which may quote the problems of gsm8k
    "gsm8k-train": "MIT", "self-instruct-seed": "Apache-2.0", "self-instruct-user": "Apache-2.0",
    "debian-handbook": "GPL-2.0-or-later OR CC-BY-SA-3.0", "anarchism": "GPL-2.0-only", "wiki-passage": "CC-BY-SA",
}  # fmt: skip
"""Licence by the source of a prompt or, after a slash in the source, the origin of its text."""
SHIPPED = ("Apache-2.0", "MIT", "Apache-2.0 AND MIT")
MAX_SELF_INSTRUCT = 100


def read(place):
    """Yield rows of `source, licence, temperature, input_ids, loss_mask`."""
    for _, row in read_rows(place):
        if "input_ids" not in row:
            prompt, answer = row["prompt_ids"], row["response_ids"]
            row["input_ids"], row["loss_mask"] = [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
        row["licence"] = LICENCES.get(row["source"].rsplit("/", 1)[-1], "unknown")
        yield {name: row[name] for name in ("source", "licence", "temperature", "input_ids", "loss_mask")}


def can_ship(row):
    quotes = row["source"].startswith("self-instruct") and row["loss_mask"].index(True) > MAX_SELF_INSTRUCT
    return row["licence"] in SHIPPED and not quotes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("places", nargs="+")
    parser.add_argument("--hottest", type=float, default=0.7)
    parser.add_argument("--ship", action="store_true")
    options = parser.parse_args()
    rows, counts = {}, defaultdict(lambda: [0, 0, 0])
    for place in options.places:
        for row in read(place):
            key = tuple(row["input_ids"])
            if key in rows or round(row["temperature"], 3) > options.hottest or (options.ship and not can_ship(row)):
                continue
            rows[key] = row
            count = counts[row["source"], row["licence"]]
            count[0], count[1], count[2] = count[0] + 1, count[1] + sum(row["loss_mask"]), count[2] + len(key)
    features = datasets.Features({
        "source": datasets.Value("string"), "licence": datasets.Value("string"),
        "temperature": datasets.Value("float32"),
        "input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("bool")),
    })  # fmt: skip
    columns = {name: [row[name] for row in rows.values()] for name in features}
    table = datasets.Dataset.from_dict(columns, features=features).data.table
    options.output.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, options.output, compression="zstd", compression_level=19)
    print("| source | licence | conversations | answer tokens | all tokens |\n|---|---|---|---|---|")
    for (source, licence), count in [
        *sorted(counts.items()),
        (("all", ""), [sum(column) for column in zip(*counts.values(), strict=True)]),
    ]:
        print(f"| {source} | {licence} | " + " | ".join(f"{number:,}" for number in count) + " |")


if __name__ == "__main__":
    main()
