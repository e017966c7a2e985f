"""What is told of the measurements: a row per category and method, warnings, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_specdec.atomic import whole_file
from hf_specdec.bench.machine import DISTURBING_SHARE
from hf_specdec.bench.measuring import Measurement
from hf_specdec.reporting.palette import INK, plot_style

SHARES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}
"""The percentiles that are told."""

ALL = "all"
"""The category of all questions."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies, linear between neighbours.

    Args:
        values: At least one, in any order.
        share: 0 to 1.

    Example: of [1, 2, 4] the share 0.5 is 2, and 0.75 is 3.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def summarise(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row per category and method; the category `all` is over all questions.

    Tokens/s and their ratio to plain's: of the whole call (median, the median again as p50 beside p20 and p80; of the
    ratio the means and the worst as well), and behind the first token (median). Seconds to the first token (median).
    Mean tau, and how many answers are plain's. Medians and percentiles are over questions; None is not known.
    """
    plain = {row.question_id: row for row in measurements if row.method == "plain"}
    categories = [*dict.fromkeys(row.category for row in measurements), ALL]
    rows = []
    for category in categories:
        for method in dict.fromkeys(row.method for row in measurements):
            chosen = [row for row in measurements if row.method == method and category in (row.category, ALL)]
            speeds = [row.tokens_per_second for row in chosen]
            ratios = [row.tokens_per_second / plain[row.question_id].tokens_per_second for row in chosen]
            decoding = [row.decode_tokens_per_second for row in chosen]
            beside = [plain[row.question_id].decode_tokens_per_second for row in chosen]
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
                    None if own is None or theirs is None else own / theirs
                    for own, theirs in zip(decoding, beside, strict=True)
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
    """What makes figures doubtful, a line each: a busy machine, compilation in timed calls."""
    found = []
    disturbed = [row for row in measurements if row.disturbed_rounds]
    if disturbed:
        calls, all_calls = (sum(counts) for counts in (
            [row.disturbed_rounds for row in disturbed], [len(row.seconds) for row in measurements],
        ))  # fmt: skip
        most = max(cores for row in disturbed for cores in row.others_cores if cores is not None)
        found.append(
            f"Other processes used more than {DISTURBING_SHARE:.0%} of a core during {calls} of {all_calls} timed "
            f"calls (at most {most:.2f} cores): their figures are disturbed."
        )
    compiled = sum(row.compiled_in_rounds for row in measurements)
    if compiled:
        names = ", ".join(dict.fromkeys(row.method for row in measurements if row.compiled_in_rounds))
        found.append(f"Something was compiled during {compiled} timed calls ({names}): that time is in their figures.")
    return found


def plot(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw tokens/s over plain's per category and method: medians, with lines from p20 to p80. Needs matplotlib.

    Args:
        summary: What `summarise` returned.
        path: The picture to write; its ending is its format. Another one of that name is replaced.
    """
    from matplotlib.figure import Figure  # an optional dependency; no window, no state of pyplot's

    categories = list(dict.fromkeys(row["category"] for row in summary))
    methods = [method for method in dict.fromkeys(row["method"] for row in summary) if method != "plain"]
    cells = {(row["category"], row["method"]): row for row in summary}
    width = 0.8 / max(len(methods), 1)
    with plot_style():
        figure = Figure(figsize=(max(6.0, 1.5 + 0.35 * len(categories) * (len(methods) + 1)), 4.0))
        axes = figure.subplots()
        for number, method in enumerate(methods):
            rows = [cells[category, method] for category in categories]
            middle = [row["speed_up"] for row in rows]
            lines = [
                [value - row["speed_up_p20"] for value, row in zip(middle, rows, strict=True)],
                [row["speed_up_p80"] - value for value, row in zip(middle, rows, strict=True)],
            ]
            places = [index + (number - (len(methods) - 1) / 2) * width for index in range(len(categories))]
            axes.bar(places, middle, 0.9 * width, yerr=lines, error_kw={"linewidth": 0.8}, label=method)
        axes.axhline(1.0, color=INK, linewidth=0.8)
        axes.set_xticks(range(len(categories)), categories)
        axes.set_ylabel("tokens/s, ratio to plain generate()")
        if methods:
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        with whole_file(path) as partial:
            figure.savefig(partial, format=path.suffix.removeprefix(".") or "png", bbox_inches="tight", dpi=110)
