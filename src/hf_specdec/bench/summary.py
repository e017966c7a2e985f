"""Summarise measurements: a row per category and method, warnings, and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_specdec.atomic import whole_file
from hf_specdec.bench.machine import DISTURBING_SHARE
from hf_specdec.bench.timing import Measurement
from hf_specdec.reporting.palette import SMALL_TEXT, Theme, plot_style

SHARES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}
"""Reported percentiles: the suffix of their names in a summary, and the `share` for `percentile`."""

ALL = "all"
"""Additional category of a summary, which contains all questions."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of some values, linearly interpolated between the two nearest ones.

    Args:
        values: At least one value, in any order.
        share: Percentile as a fraction: 0 is the minimum, 0.5 the median, 1 the maximum.

    Example: for [1, 2, 4], share 0.5 gives 2 and share 0.75 gives 3.
    """
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def summarise(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return one row per category and method; the category `all` contains all questions.

    `tokens_per_second`, its ratio to plain decoding (`speed_up`), both after the first token (`decode_...`) and
    `time_to_first_token` (seconds) are medians over the questions, except with a suffix such as `_p20` or `_mean`.
    `tau` is a mean. `ids_equal` counts questions answered with plain decoding's token ids. Unknown values are None.

    Args:
        measurements: Must include one by `plain` for every question.
    """
    plain = {row.question_id: row for row in measurements if row.method == "plain"}
    categories = dict.fromkeys([*(row.category for row in measurements), ALL])
    rows = []
    for category in categories:
        for method in dict.fromkeys(row.method for row in measurements):
            chosen = [row for row in measurements if row.method == method and category in (row.category, ALL)]
            speeds = [row.tokens_per_second for row in chosen]
            ratios = [row.tokens_per_second / plain[row.question_id].tokens_per_second for row in chosen]
            decoding = [row.decode_tokens_per_second for row in chosen]
            plain_decoding = [plain[row.question_id].decode_tokens_per_second for row in chosen]
            rows.append({
                "category": category, "method": method, "questions": len(chosen),
                "tokens_per_second": statistics.median(speeds),
                **{f"tokens_per_second_{name}": percentile(speeds, share) for name, share in SHARES.items()},
                "speed_up": statistics.median(ratios),
                **{f"speed_up_{name}": percentile(ratios, share) for name, share in SHARES.items()},
                "speed_up_geometric_mean": statistics.geometric_mean(ratios),
                "speed_up_mean": statistics.mean(ratios), "speed_up_worst": min(ratios),
                "decode_tokens_per_second": _median(decoding),
                "decode_speed_up": _median([
                    None if speed is None or baseline is None else speed / baseline
                    for speed, baseline in zip(decoding, plain_decoding, strict=True)
                ]),
                "time_to_first_token": _median([row.time_to_first_token for row in chosen]),
                "tau": statistics.mean(row.tau for row in chosen),
                "ids_equal": sum(row.ids_equal for row in chosen),
            })  # fmt: skip
    return rows


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def warnings_of(measurements: Sequence[Measurement]) -> list[str]:
    """Return warnings about measurements on a busy machine or with compilation in timed calls; empty if none.

    Args:
        measurements: What `measure` yielded.
    """
    found = []
    disturbed = [row for row in measurements if row.disturbed_rounds]
    if disturbed:
        calls, all_calls = (sum(counts) for counts in (
            [row.disturbed_rounds for row in disturbed], [len(row.seconds) for row in measurements],
        ))  # fmt: skip
        most = max(cores for row in disturbed for cores in row.others_cores if cores is not None)
        found.append(
            f"Other processes used more than {DISTURBING_SHARE:.0%} of a core during {calls} of {all_calls} timed "
            f"calls (at most {most:.2f} cores): these measurements are unreliable."
        )
    compiled = sum(row.compiled_in_rounds for row in measurements)
    if compiled:
        names = ", ".join(dict.fromkeys(row.method for row in measurements if row.compiled_in_rounds))
        found.append(f"Code was compiled during {compiled} timed calls ({names}): their times include compilation.")
    return found


def plot(summary: Sequence[dict[str, Any]], path: Path, *, theme: Theme = "light") -> None:
    """Save a bar chart of each method's median speed-up over `plain` by category, with error bars from p20 to p80.

    Needs matplotlib.

    Args:
        summary: Output of `summarise`.
        path: File to write or replace; its suffix selects the format, PNG if it has none.
        theme: `"light"` or `"dark"`.
    """
    from matplotlib.figure import Figure  # optional dependency; without pyplot, which would open windows

    categories = list(dict.fromkeys(row["category"] for row in summary))
    methods = [method for method in dict.fromkeys(row["method"] for row in summary) if method != "plain"]
    cells = {(row["category"], row["method"]): row for row in summary}
    width = 0.8 / max(len(methods), 1)
    with plot_style(theme) as colors:
        figure = Figure(figsize=(max(6.0, 1.5 + 0.35 * len(categories) * (len(methods) + 1)), 4.0))
        axes = figure.subplots()
        for number, method in enumerate(methods):
            rows = [cells[category, method] for category in categories]
            middle = [row["speed_up"] for row in rows]
            lines = [
                [value - row["speed_up_p20"] for value, row in zip(middle, rows, strict=True)],
                [row["speed_up_p80"] - value for value, row in zip(middle, rows, strict=True)],
            ]
            positions = [index + (number - (len(methods) - 1) / 2) * width for index in range(len(categories))]
            axes.bar(positions, middle, 0.9 * width, yerr=lines, error_kw={"linewidth": 0.8}, label=method)
        axes.axhline(1.0, color=colors.ink, linewidth=0.8)
        axes.set_xticks(range(len(categories)), categories)
        axes.set_ylabel("tokens/s, ratio to plain generate()")
        if methods:
            axes.legend(fontsize=SMALL_TEXT, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        with whole_file(path) as partial:
            figure.savefig(partial, format=path.suffix.removeprefix(".") or "png", bbox_inches="tight", dpi=110)
