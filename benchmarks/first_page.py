"""What the README and the results show: record the race, and draw race, bar chart and table from raw rows.

    python benchmarks/first_page.py record   # benchmarks/results/race_cpu_bf16.json, on an idle machine
    python benchmarks/first_page.py calls    # benchmarks/results/first_calls_cpu_bf16.json, likewise
    python benchmarks/first_page.py draw     # docs/race-*.svg and docs/speed-*.svg, each also for phones (*-narrow-*)
    python benchmarks/first_page.py table    # the table by category of docs/benchmarks/results.md

The rows of chart and table come from one run of `benchmarks/peers.py`, see `docs/benchmarks/results.md`.
"""

import argparse
import ast
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
import transformers

from hf_specdec import bench
from hf_specdec.bench.machine import versions
from hf_specdec.generation import loading
from hf_specdec.generation.state import state_of
from hf_specdec.viz.live import StepStreamer

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PROMPT = "Write a Python class `Point` with the attributes x and y and the methods add and subtract."
METHODS = {"plain": None, "auto": "auto"}
FIRST_CALLS = {"code": PROMPT, "prose": "Why is the sky blue? Explain in detail."}
"""Questions of `first_calls` beside the README's example, whose answers repeat little."""

SHOWN = {
    "plain": "plain generate()",
    "transformers_prompt_lookup": "transformers' lookup",
    "auto_no_head": "auto, no head, kernels off",
    "auto+none": "auto with head, kernels off",
    "plain+kernels": "plain, CPU kernels",
    "auto_no_head+kernels": "auto, no head, CPU kernels",
    "auto+kernels": "auto with head, CPU kernels",
    "llama_cpp": "llama.cpp, no drafts",
}
"""Methods of chart and table, in the order of the table, and their names there."""

CHART = (
    {"plain": "other", "transformers_prompt_lookup": "other", "llama_cpp": "other"},
    {"auto_no_head": "auto", "auto+none": "auto"},
    {"plain+kernels": "kernels", "auto_no_head+kernels": "auto", "auto+kernels": "auto"},
)
"""Groups of the chart's bars: methods, and what each has of this package."""
LEGEND = {"other": "without this package", "auto": 'speculative="auto"', "kernels": "CPU kernels, no drafts"}


# ------------------------------------------------------------------------------------------------- recording


def record(options):
    """Answer the prompt several times, plainly and with `auto` in turn; write the run of median length of each.

    Drafters forget what they learned from the prompt before every run.
    """
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    model, tokenizer = loading.load_model(None, None, torch.bfloat16)
    inputs = loading.encode_chat(tokenizer, [PROMPT], model.device)
    model.warmup("auto", prompt_length=inputs["input_ids"].shape[1])
    runs, nothing_learned = {name: [] for name in METHODS}, state_of(model).state_dict()
    for turn in range(options.rounds + 1):
        for name, speculative in METHODS.items():
            state_of(model).load_state_dict(nothing_learned)
            recorder = StepStreamer(tokenizer)
            model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False, streamer=recorder,
                           speculative=speculative)  # fmt: skip
            if turn:  # the first round warms up
                runs[name].append(recorder)
    chosen = {name: sorted(found, key=lambda run: run.seconds)[len(found) // 2] for name, found in runs.items()}
    written = {
        "environment": bench.environment(model), "prompt": PROMPT,
        "seconds_of_all_runs": {name: [run.seconds for run in found] for name, found in runs.items()},
        "runs": {
            name: {
                "seconds": run.seconds,
                "pieces": [[piece.seconds, piece.num_tokens, piece.text] for piece in run.pieces],
            }
            for name, run in chosen.items()
        },
    }  # fmt: skip
    options.json.write_text(json.dumps(written, indent=1))
    for name, found in runs.items():
        print(f"{name}: {statistics.median(run.seconds for run in found):.2f} s")


# ------------------------------------------------------------------------------------------------- first calls


def readme_task():
    """Return the question of the README's example."""
    code = (ROOT / "README.md").read_text().split("<!-- example -->", 1)[1]
    return ast.literal_eval(code[code.index("text = ") + len("text = ") : code.index("chat = ")].strip())


def first_calls(options):
    """Time the first call of a process, in a new process for each question and method; write all times."""
    questions = {"the README's example": readme_task(), **FIRST_CALLS}
    rows = []
    for turn in range(options.rounds):
        for question, text in questions.items():
            for method in METHODS:
                command = [sys.executable, "-W", "ignore", __file__, "call", method, text]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                rows.append({"question": question, "method": method, "round": turn, **json.loads(done.stdout)})
    written = {"environment": versions(torch.device("cpu")), "date": time.strftime("%Y-%m-%d"), "rows": rows}
    options.json.write_text(json.dumps(written, indent=1))
    for question, found in first_seconds(written).items():
        print(question, found)


def first_seconds(written):
    """Return the median seconds by question and method of what `first_calls` wrote."""
    found = {}
    for question in dict.fromkeys(row["question"] for row in written["rows"]):
        found[question] = {
            method: statistics.median(
                row["seconds"] for row in written["rows"] if (row["question"], row["method"]) == (question, method)
            )
            for method in METHODS
        }
    return found


def call(options):
    """Print the seconds, tokens and forwards of the first call of this process as JSON."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, None, torch.bfloat16)
    for name in list(model.drafters):  # as in the README's example, no head is loaded
        model.remove_drafter(name)
    inputs = loading.encode_chat(tokenizer, [options.text], model.device)
    begin = time.perf_counter()
    ids = model.generate(**inputs, max_new_tokens=128, do_sample=False, speculative=METHODS[options.method])
    seconds, tokens = time.perf_counter() - begin, ids.shape[1] - inputs["input_ids"].shape[1]
    forwards = tokens if options.method == "plain" else model.last_speculation.num_target_forwards
    print(json.dumps({"seconds": seconds, "tokens": tokens, "forwards": forwards}))


# ------------------------------------------------------------------------------------------------- the race


@dataclass(frozen=True)
class Theme:
    """Colours of a picture."""

    background: str
    panel: str
    text: str
    faint: str
    accent: str
    steps: tuple[str, ...]  # text of steps that emitted several tokens


THEMES = {
    "light": Theme(
        "#ffffff", "#f6f8fa", "#1f2328", "#59636e", "#0a6640", ("#8a3b00", "#0550ae", "#6f1d8a", "#0a6640")
    ),
    "dark": Theme("#0d1117", "#161b22", "#e6edf3", "#9aa4af", "#56d364",
                  ("#ffa657", "#79c0ff", "#d2a8ff", "#56d364")),
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Where the race's two panels are: side by side, or one below the other on a narrow screen."""

    columns: int  # characters of a line of an answer
    line: int  # distance of two lines
    is_stacked: bool
    titles: tuple[str, str]

    @property
    def panel(self):
        """Width of a panel."""
        return round(self.columns * ADVANCE) + 32

    @property
    def width(self):
        return 16 + self.panel if self.is_stacked else 32 + 2 * self.panel


LAYOUTS = {
    "": Layout(50, 18, False, ("model.generate()", 'model.generate(speculative="auto")')),
    "-narrow": Layout(44, 16, True, ("generate()", 'speculative="auto"')),
}
"""By the end of the picture's name."""
SIZE, ADVANCE = 13, 7.84
"""Size of the text, and width of a character."""
PAUSE = 3.0
"""Seconds for which the finished race is shown before it begins again."""
ROUNDS = 3
"""How often the race runs; then the picture shows both finished answers."""


class Race:
    """The race as an animated SVG, which shows the finished answers if animations are not supported.

    Args:
        recorded: What `record` wrote.
        theme: Colours.
        layout: Where the panels are.
    """

    def __init__(self, recorded, theme, layout):
        self.recorded, self.theme, self.layout = recorded, theme, layout
        self.total = max(run["seconds"] for run in recorded["runs"].values()) + PAUSE
        self.lines = max(self._layout(run)[-1][1] + 1 for run in recorded["runs"].values())

    def svg(self):
        theme, layout = self.theme, self.layout
        plain, auto = (self.recorded["runs"][name] for name in METHODS)
        panels = 2 if layout.is_stacked else 1
        captions = self._captions()
        width, height = layout.width, panels * (self._panel_height() + 8) + 24 + 16 * len(captions)
        second = (8, self._panel_height() + 16) if layout.is_stacked else (layout.panel + 24, 8)
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" role="img">',
            f"<title>Plain generate() takes {plain['seconds']:.1f} s, speculative {auto['seconds']:.1f} s</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{theme.background}"/>',
            *self._panel((8, 8), layout.titles[0], plain, coloured=False),
            *self._panel(second, layout.titles[1], auto, coloured=True),
            *(
                f'<text x="16" y="{height - 12 - 16 * above}" font-size="11" fill="{theme.faint}">'
                f"{escape(caption)}</text>"
                for above, caption in enumerate(reversed(captions))
            ),
            "</svg>",
        ])  # fmt: skip

    def _captions(self):
        """Return the lines below the panels."""
        environment = self.recorded["environment"]
        recorded = f"Recorded run: {environment['model'].split('/')[-1]}, {environment['dtype']},"
        machine = f"{environment['cores']} cores ({environment['device'].replace('(R)', '')})."
        colours = "Words of one colour came in one step."
        return [recorded, machine, colours] if self.layout.is_stacked else [f"{recorded} {machine} {colours}"]

    def _panel_height(self):
        return 48 + self.lines * self.layout.line

    def _panel(self, corner, title, run, *, coloured):
        theme, layout, (left, top) = self.theme, self.layout, corner
        size = f'width="{layout.panel}" height="{self._panel_height()}"'
        yield f'<rect x="{left}" y="{top}" {size} rx="6" fill="{theme.panel}"/>'
        style = f'x="{left + 16}" y="{top + 22}" font-size="{SIZE}" font-weight="bold"'
        yield f'<text {style} fill="{theme.text}">{escape(title)}</text>'
        yield from self._clock((left + layout.panel - 16, top + 22), run)
        several = 0
        for step, line, column, text in self._layout(run):
            seconds, tokens, _ = run["pieces"][step]
            colour = theme.text
            if coloured and tokens > 1:
                several = sum(count > 1 for _, count, _ in run["pieces"][:step])
                colour = theme.steps[several % len(theme.steps)]
            yield (
                f'<text x="{left + 16 + column * ADVANCE:.1f}" y="{top + 50 + line * layout.line}" font-size="{SIZE}" '
                f'fill="{colour}" textLength="{len(text) * ADVANCE:.1f}" xml:space="preserve">'
                f"{escape(text)}{self._from(seconds)}</text>"
            )

    def _clock(self, end_of_line, run):
        """Yield a clock that stops at the end of the run, and then the speed."""
        count = sum(tokens for _, tokens, _ in run["pieces"])
        style = f'x="{end_of_line[0]}" y="{end_of_line[1]}" font-size="{SIZE}" text-anchor="end"'
        for tick in range(int(run["seconds"] * 10) + 1):
            begin, end = tick / 10, min((tick + 1) / 10, run["seconds"])
            shown = (
                f'<animate attributeName="opacity" values="0;1;0" keyTimes="0;{begin / self.total:.5f};'
                f'{end / self.total:.5f}" calcMode="discrete" dur="{self.total:.2f}s" repeatCount="{ROUNDS}"/>'
            )
            yield f'<text {style} fill="{self.theme.faint}" opacity="0">{begin:.1f} s{shown}</text>'
        final = f"{run['seconds']:.1f} s, {count / run['seconds']:.0f} tok/s"
        shown = self._from(run["seconds"])
        yield f'<text {style} fill="{self.theme.accent}" font-weight="bold">{final}{shown}</text>'

    def _from(self, seconds):
        """Return the animation that shows an element from this time on."""
        return (
            f'<animate attributeName="opacity" values="0;1" keyTimes="0;{seconds / self.total:.5f}" '
            f'calcMode="discrete" dur="{self.total:.2f}s" repeatCount="{ROUNDS}"/>'
        )

    def _layout(self, run):
        """Return `(step, line, column, text)` of all parts of the text; lines break at words."""
        text = "".join(piece for _, _, piece in run["pieces"])
        steps = [step for step, (_, _, piece) in enumerate(run["pieces"]) for _ in piece]
        line, column, parts, begin = 0, 0, [], 0
        while begin < len(text):
            if text[begin] == "\n":
                line, column, begin = line + 1, 0, begin + 1
                continue
            end = begin + 1
            if text[begin] != " ":
                while end < len(text) and text[end] not in " \n":
                    end += 1
            if column + end - begin > self.layout.columns:
                line, column = line + 1, 0
            for place in range(begin, end):
                if parts and parts[-1][:2] == [steps[place], line]:
                    parts[-1][3] += text[place]
                else:
                    parts.append([steps[place], line, column, text[place]])
                column += 1
            begin = end
        return [part for part in parts if part[3].strip()]


# ------------------------------------------------------------------------------------------------- chart and table


def rows_of(results):
    """Return the table's rows of a results file: category (or "mean", "worst") to values by method.

    A value is `(speed-up, tau)`: the mean of the questions' speed-ups over plain `generate()`, prompts included; the
    row "mean" has the mean of the categories, "worst" the smallest speed-up of a question.
    """
    summary = {(row["category"], row["method"]): row for row in results["summary"]}
    categories = [name for name in dict.fromkeys(row["category"] for row in results["summary"]) if name != "all"]
    found = {
        name: {method: (summary[name, method]["speed_up_mean"], summary[name, method]["tau"]) for method in SHOWN}
        for name in categories
    }
    found["mean"] = {
        method: (statistics.mean(found[name][method][0] for name in categories), summary["all", method]["tau"])
        for method in SHOWN
    }
    found["worst"] = {method: (summary["all", method]["speed_up_worst"], None) for method in SHOWN}
    return found


def table(results):
    """Return the table by category of `docs/benchmarks/results.md`, without its header, as lines of Markdown."""
    summary = {(row["category"], row["method"]): row for row in results["summary"]}
    lines = []
    for name, values in rows_of(results).items():
        speed = summary.get((name, "plain"), {}).get("tokens_per_second")
        cells = [f"{values[method][0]:.2f}x" for method in list(SHOWN)[1:]]
        if name in ("mean", "worst"):
            name = {"mean": "**mean of categories**", "worst": "worst question"}[name]
            cells = [f"**{cell}**" for cell in cells] if "mean" in name else cells
        lines.append(f"| {name} | " + " | ".join(["" if speed is None else f"{speed:.1f}", *cells]) + " |")
    return lines


def chart(results, theme, path, *, is_narrow=False):
    """Draw the mean speed-ups as bars in groups into a file; in a narrow chart the names are above the bars."""
    from matplotlib import patches, pyplot

    means = rows_of(results)["mean"]
    colours = {"other": theme.faint, "kernels": f"{theme.steps[1]}80", "auto": theme.steps[1]}
    bars, place = [], 0.0
    for group in CHART:
        for method, kind in group.items():
            bars.append((place, SHOWN[method], means[method][0], colours[kind]))
            place += 1
        place += 0.4
    places, names, values, shades = (list(column) for column in zip(*bars, strict=True))
    settings = {"svg.fonttype": "path", "svg.hashsalt": "hf-specdec", "font.size": 11, "text.color": theme.text,
                "axes.labelcolor": theme.text, "xtick.color": theme.text, "ytick.color": theme.text}  # fmt: skip
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(4.4, 5.6) if is_narrow else (8.8, 4.0), facecolor=theme.background)
        axes.set_facecolor(theme.background)
        drawn = axes.barh(places, values, color=shades, height=0.42 if is_narrow else 0.66)
        axes.bar_label(drawn, [f"{value:.2f}x" for value in values], padding=4)
        axes.set_yticks([] if is_narrow else places, [] if is_narrow else names)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(values))
        axes.set_xlabel("tokens per second relative to plain generate()" + ("" if is_narrow else ", prompts included"))
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(theme.faint)
        axes.tick_params(axis="y", length=0)
        if is_narrow:
            for place, name in zip(places, names, strict=True):
                axes.annotate(name, (0, place - 0.27), (3, 0), textcoords="offset points", va="bottom")
        handles = [patches.Patch(color=colours[kind]) for kind in LEGEND]
        axes.legend(handles, LEGEND.values(), frameon=False, ncols=1 if is_narrow else 3, loc="lower center",
                    bbox_to_anchor=(0.4, 1.0))  # fmt: skip
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)


def draw(options):
    """Draw all pictures in both themes."""
    recorded, results = (json.loads(path.read_text()) for path in (options.race, options.results))
    for name, theme in THEMES.items():
        for kind, layout in LAYOUTS.items():
            (options.docs / f"race{kind}-{name}.svg").write_text(Race(recorded, theme, layout).svg() + "\n")
            chart(results, theme, options.docs / f"speed{kind}-{name}.svg", is_narrow=layout.is_stacked)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="record the race")
    recording.add_argument("--json", type=Path, default=RESULTS / "race_cpu_bf16.json")
    recording.add_argument("--max-new-tokens", type=int, default=128)
    recording.add_argument("--rounds", type=int, default=5)
    recording.add_argument("--threads", type=int, default=torch.get_num_threads())
    recording.set_defaults(run=record)
    timing = commands.add_parser("calls", help="time first calls")
    timing.add_argument("--json", type=Path, default=RESULTS / "first_calls_cpu_bf16.json")
    timing.add_argument("--rounds", type=int, default=3)
    timing.set_defaults(run=first_calls)
    one = commands.add_parser("call", help="the first call of this process; used by `calls`")
    one.add_argument("method", choices=[*METHODS])
    one.add_argument("text")
    one.set_defaults(run=call)
    drawing = commands.add_parser("draw", help="draw race and bar chart")
    drawing.add_argument("--race", type=Path, default=RESULTS / "race_cpu_bf16.json")
    drawing.add_argument("--docs", type=Path, default=ROOT / "docs")
    drawing.set_defaults(run=draw)
    printing = commands.add_parser("table", help="print the table")
    printing.set_defaults(run=lambda options: print("\n".join(table(json.loads(options.results.read_text())))))
    for command in (drawing, printing):
        command.add_argument("--results", type=Path, default=RESULTS / "first_page_cpu_bf16.json")
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
