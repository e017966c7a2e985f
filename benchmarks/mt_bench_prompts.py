"""MT-bench's questions of a Spec-Bench file, each category for itself; elsewhere they count as one, `mt_bench`.

python benchmarks/mt_bench_prompts.py spec_bench.jsonl mt_bench.jsonl
"""

import json
import sys
from pathlib import Path

from hf_specdec import bench


def main(source, target):
    rows = [json.loads(line) for line in Path(source).read_text().splitlines() if line.strip()]
    chosen = [{**row, "category": f"mt:{row['category']}"} for row in rows if row["category"] in bench.MT_BENCH]
    Path(target).write_text("".join(json.dumps(row) + "\n" for row in chosen))
    print(f"{len(chosen)} questions")


if __name__ == "__main__":
    main(*sys.argv[1:])
