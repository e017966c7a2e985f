"""Run the GPU benchmarks within a time limit; every item runs in a separate process.

    python benchmarks/gpu.py --minutes 10 --json gpu.jsonl
    python benchmarks/gpu.py --quick --json gpu.jsonl            # three minutes
    python benchmarks/gpu.py --items oracle tests --json gpu.jsonl

Needs PyTorch, transformers and this repository or its source distribution, but no network, model files or installed
package. `gpu_items.py` lists the items and their bars (required values). Every row is written as a JSON line at once,
so nothing is lost at a time limit. If an item fails, hangs or crashes, the next one runs. Each bar is printed as pass,
FAIL or "not measured" with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_rows import rows_of

HERE = Path(__file__).parent
SECONDS_OF_A_PART = 60
SECONDS_TO_STOP = 5
"""Time between SIGTERM and SIGKILL, for a process to write its last line."""


def known_items() -> dict[str, Any]:
    """Return items by name, in the order in which they run."""
    for folder in (HERE, HERE.parent / "src"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    from gpu_items import ITEMS

    return {item.name: item for item in ITEMS}


def run_in_process(name: str, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run one item in a new process.

    Args:
        name: The item.
        arguments: Further arguments of this script.
        seconds: Time limit, after which the process and its children are stopped.

    Returns:
        Exit status (None at the time limit) and the end of the output.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--run", name, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        with contextlib.suppress(ProcessLookupError):  # parts that are still running after a crash
            os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output[-2000:]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return None, output[-2000:]


def drive(items: Sequence[Any], path: Path, minutes: float, arguments: Sequence[str]) -> bool:
    """Run items one after another, print their results, and return whether none failed.

    If the first item finds no device, the others are not started.
    """
    end, fine, absent = time.monotonic() + 60 * minutes, True, None
    for number, item in enumerate(items):
        begin, left = path.stat().st_size, end - time.monotonic()
        rows: list[dict[str, Any]] = []
        if absent is not None:
            ending = {"status": "not measured", "reason": absent, "seconds": 0.0}
        elif left < 1:
            reason = f"the time limit of {minutes:g} minutes was reached before it"
            ending = {"status": "not measured", "reason": reason, "seconds": 0.0}
        else:
            ending = run_item(item, path, min(item.seconds, left), arguments)
            rows = rows_of(path, item.name, begin)
        if not any(row["kind"] == "end" for row in rows):
            ending = {"item": item.name, "kind": "end", **ending}
            with path.open("a") as file:
                file.write(json.dumps(ending) + "\n")
        if number == 0 and ending.get("no_device"):
            absent = ending["reason"]
        fine &= report(item, rows, ending)
    return fine


def run_item(item: Any, path: Path, limit: float, arguments: Sequence[str]) -> dict[str, Any]:
    """Run an item in a new process and return its "end" row, or one made here if it wrote none."""
    begin, started = path.stat().st_size, time.monotonic()
    status, output = run_in_process(item.name, arguments, limit)
    seconds = round(time.monotonic() - started, 1)
    rows = rows_of(path, item.name, begin)
    ending = next((row for row in rows if row["kind"] == "end"), None)
    if ending is not None:
        return ending
    if status is None:
        reason = f"stopped at its limit of {limit:.0f} s after {len(rows)} rows"
        return {"status": "stopped", "reason": reason, "seconds": seconds, "output": output}
    return {"status": "failed", "reason": f"exit status {status}", "seconds": seconds, "output": output}


def run_part(kit: Any, part: str, key: str) -> None:
    """Run one part of an item in a new process, which writes rows; write a row if it fails or hangs.

    Args:
        kit: The item's kit.
        part: Name of the part.
        key: Key of the name in that row.
    """
    options = kit.options
    command = [
        sys.executable, str(Path(__file__).resolve()), "--run", options.run, "--part", part,
        "--json", str(options.json), "--device", options.device, "--sizes", json.dumps(options.sizes),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
            timeout=SECONDS_OF_A_PART,
        )  # fmt: skip
        failed = f"exit status {done.returncode}: {done.stdout[-1000:]}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = f"it took longer than {SECONDS_OF_A_PART} s"
    if failed:
        kit.row(**{key: part}, failed=failed)


def report(item: Any, rows: Sequence[dict[str, Any]], ending: dict[str, Any]) -> bool:
    """Print the result of an item and of its bars; return whether nothing failed."""
    reason = f": {ending['reason']}" if ending.get("reason") else ""
    print(f"{item.name}: {ending['status']}{reason} ({ending['seconds']:.0f} s, {len(rows)} rows)", flush=True)
    bars = {row["bar"]: row for row in rows if row["kind"] == "bar"}
    for bar in item.bars:
        row = bars.get(bar.name, {"passed": None, "reason": ending.get("reason", "the item did not measure it")})
        if row["passed"] is None:
            print(f"  not measured  {bar.name} (wanted {bar.wanted}): {row['reason']}", flush=True)
            continue
        verdict = "pass" if row["passed"] else "FAIL"
        print(f"  {verdict}  {bar.name}: {row['value']:.4g} (wanted {bar.wanted})", flush=True)
    if ending.get("output"):
        print(ending["output"], flush=True)
    missed = [row for row in bars.values() if row["passed"] is False]
    return ending["status"] in ("measured", "not measured") and not missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the items and return 1 if an item failed or missed a bar, else 0."""
    items = known_items()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="JSON-lines file to write; must not exist")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit for all items together")
    parser.add_argument("--items", nargs="+", choices=list(items), help="items to run (default: all)")
    parser.add_argument("--quick", action="store_true", help="run the most important items only, within three minutes")
    parser.add_argument("--run", choices=list(items), help=argparse.SUPPRESS)  # run one item in this process
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of that item, which started this process
    parser.add_argument("--device", default="cuda", help="type of the accelerator")
    parser.add_argument("--sizes", type=json.loads, default={}, help="JSON object: sizes of the Llama (default: 8B)")
    options = parser.parse_args(arguments)
    if options.run:
        return int(items[options.run].run(options))
    if options.json.exists():
        parser.error(f"{options.json} exists: give another file, or delete it.")
    chosen = [item for item in items.values() if item.name in (options.items or items)]
    if options.quick and not options.items:
        chosen = [item for item in chosen if item.is_quick]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.touch()
    passed = ["--json", str(options.json), "--device", options.device, "--sizes", json.dumps(options.sizes)]
    return 0 if drive(chosen, options.json, 3.0 if options.quick else options.minutes, passed) else 1


if __name__ == "__main__":
    sys.exit(main())
