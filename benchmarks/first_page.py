"""What the README and the results show: record the race, and draw race, bar chart and table from raw rows.

    python benchmarks/first_page.py record MODEL NAME  # benchmarks/results/race_cpu.json, on an idle machine
    python benchmarks/first_page.py calls   # benchmarks/results/first_calls_cpu_bf16.json, likewise
    python benchmarks/first_page.py draw    # docs/race-*.svg, docs/speed-*.svg; for phones *-narrow-*
    python benchmarks/first_page.py table   # the table by category of docs/benchmarks/results.md

MODEL and llama.cpp's server are those of `benchmarks/quantized.py`, whose rows are the chart's first group. The rows
of its second group and of the table come from one run of `benchmarks/peers.py`, see `docs/benchmarks/results.md`.
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

import quantized
import torch
import transformers

from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.bench.machine import versions
from hf_specdec.generation import loading
from hf_specdec.generation.state import state_of
from hf_specdec.viz.live import StepStreamer
from hf_specdec.viz.text import Piece

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PROMPT = "Write a Python class `Point` with the attributes x and y and the methods add and subtract."
LANES = {
    "transformers": "transformers, bfloat16", "llama.cpp": "llama.cpp, 4 bits", "gguf-rounded": "hf-specdec, 4 bits",
}  # fmt: skip
"""Who answers in the race, as `benchmarks/quantized.py` calls their forms, and the titles of their panels."""
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

CHART = {
    "plain": "other", "transformers_prompt_lookup": "other", "llama_cpp": "other", "auto_no_head": "auto",
    "plain+kernels": "kernels", "auto_no_head+kernels": "auto",
}  # fmt: skip
"""Bars of the chart's second group: methods, and what each has of this package."""
LAPTOP = {
    ("transformers", "plain"): ("plain generate(), bfloat16", "other"),
    ("llama.cpp", "plain"): ("llama.cpp, 4 bits", "other"),
    ("llama.cpp", "ngram"): ("llama.cpp, lookup", "other"),
    ("llama.cpp", "assistant"): ("llama.cpp, 0.5B drafts", "other"),
    ("gguf-rounded", "plain"): ("hf-specdec, plain, 4 bits", "kernels"),
    ("gguf-rounded", "auto"): ("hf-specdec, auto, 4 bits", "auto"),
    ("gguf-rounded", "assistant"): ("hf-specdec, auto, 0.5B drafts", "auto"),
}
"""Bars of its first group: form and mode of `benchmarks/quantized.py`, name, and what each has of this package."""
LEGEND = {"other": "without this package", "auto": 'speculative="auto"', "kernels": "CPU kernels, no drafts"}


# ------------------------------------------------------------------------------------------------- recording


def record(options):
    """Let every lane answer the prompt several times, one lane after the other; write each one's run of median length.

    Drafters forget what they learned from the prompt before every run. The first run of a lane only warms up.
    """
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model / "hf")
    prompt = loading.encode_chat(tokenizer, [PROMPT], torch.device("cpu"))
    found, chosen = {}, {}
    for lane in LANES:
        answer, end = (llama_lane if lane == "llama.cpp" else torch_lane)(lane, options, tokenizer)
        runs = sorted([answer(prompt) for _ in range(options.rounds + 1)][1:], key=lambda run: run[-1].seconds)
        end()
        found[lane], chosen[lane] = [run[-1].seconds for run in runs], runs[len(runs) // 2]
        print(f"{lane}: {statistics.median(found[lane]):.2f} s", flush=True)
    written = {
        "environment": versions(torch.device("cpu")), "date": time.strftime("%Y-%m-%d"), "model": options.name,
        "prompt": PROMPT, "seconds_of_all_runs": found,
        "runs": {
            lane: {
                "seconds": run[-1].seconds,
                "pieces": [[round(piece.seconds, 4), piece.num_tokens, piece.text] for piece in run],
            }
            for lane, run in chosen.items()
        },
    }  # fmt: skip
    options.json.write_text(json.dumps(written, indent=1))


def torch_lane(lane, options, tokenizer):
    """Return a function from a prompt to the pieces of its answer by transformers or this package; and one to end."""
    model, call = quantized.load(lane, options.model), {}
    model.generation_config = transformers.GenerationConfig.from_pretrained(options.model / "hf")
    if lane != "transformers":
        call["speculative"] = {"method": "auto", "compile": "kernels"}
        SpeculativeGenerationMixin.attach(model).warmup(call["speculative"])
        nothing_learned = state_of(model).state_dict()

    def answer(prompt):
        if call:
            state_of(model).load_state_dict(nothing_learned)
        recorder = StepStreamer(tokenizer)
        model.generate(**prompt, max_new_tokens=options.max_new_tokens, do_sample=False, streamer=recorder, **call)
        return recorder.pieces

    return answer, lambda: None


def llama_lane(_lane, options, _tokenizer):
    """Return the same functions for llama.cpp."""
    server, ask = quantized.llama_server("plain", options)

    def answer(prompt):
        body = quantized.llama_request(prompt["input_ids"][0].tolist(), options.max_new_tokens)
        begin = time.perf_counter()
        with ask("/completion", {**body, "stream": True}) as reply:
            events = (json.loads(line[len("data: ") :]) for line in reply if line.startswith(b"data: "))
            return [Piece(event["content"], len(event["tokens"]), step, time.perf_counter() - begin)
                    for step, event in enumerate(events) if event["tokens"]]  # fmt: skip

    return answer, server.terminate


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
    """Where the race's panels are: side by side, or one below the other on a narrow screen."""

    columns: int  # characters of a line of an answer
    line: int  # distance of two lines
    is_stacked: bool

    @property
    def panel(self):
        """Width of a panel."""
        return round(self.columns * ADVANCE) + 32

    @property
    def width(self):
        return 16 + self.panel if self.is_stacked else 8 + len(LANES) * (self.panel + 8)


LAYOUTS = {"": Layout(38, 17, False), "-narrow": Layout(46, 15, True)}
"""By the end of the picture's name."""
SIZE, ADVANCE = 12, 7.24
"""Size of the text, and width of a character."""
PAUSE = 3.0
"""Seconds for which the finished race is shown before it begins again."""
ROUNDS = 3
"""How often the race runs; then the picture shows the finished answers."""


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
        theme, layout, runs = self.theme, self.layout, self.recorded["runs"]
        captions, below = self._captions(), self._panel_height() + 8
        told = "; ".join(f"{LANES[lane]}: {run['seconds']:.1f} s" for lane, run in runs.items())
        width, height = layout.width, (len(runs) if layout.is_stacked else 1) * below + 24 + 16 * len(captions)
        panels = []
        for number, (lane, run) in enumerate(runs.items()):
            corner = (8, 8 + number * below) if layout.is_stacked else (8 + number * (layout.panel + 8), 8)
            panels += self._panel(corner, LANES[lane], run, coloured=lane == [*runs][-1])
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" role="img">',
            f"<title>{told}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{theme.background}"/>',
            *panels,
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
        captions = [
            f"Recorded: {self.recorded['model']}; 4 bits: Q4_K_M.",
            f"{environment['cores']} cores ({environment['device'].replace('(R)', '')}).",
            "Words of one colour came in one step.",
        ]
        return captions if self.layout.is_stacked else [" ".join(captions)]

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


def laptop_means(race):
    """Return the mean speed-ups over transformers' plain `generate()` in bfloat16, by form and mode.

    Args:
        race: What `benchmarks/quantized.py` wrote; only questions that transformers answered count.
    """
    speeds = {
        (run["form"], run["mode"]): {
            (row["set"], row["index"]): row["tokens"] / row["seconds"] for row in run["rows"]
        }
        for run in race["runs"]
    }  # fmt: skip
    plain = speeds["transformers", "plain"]
    return {
        key: statistics.mean(found[question] / speed for question, speed in plain.items())
        for key, found in speeds.items() if key in LAPTOP
    }  # fmt: skip


def chart(results, race, theme, path, *, is_narrow=False):
    """Draw the mean speed-ups as bars in groups into a file; in a narrow chart the names are above the bars."""
    from matplotlib import patches, pyplot

    small, large = rows_of(results)["mean"], laptop_means(race)
    colours = {"other": theme.faint, "kernels": f"{theme.steps[1]}80", "auto": theme.steps[1]}
    groups = (
        ("Qwen2.5-Coder-1.5B", [(name, large[key], kind) for key, (name, kind) in LAPTOP.items()]),
        ("SmolLM2-135M, bfloat16", [(SHOWN[method], small[method][0], kind) for method, kind in CHART.items()]),
    )
    settings = {"svg.fonttype": "path", "svg.hashsalt": "hf-specdec", "font.size": 11, "text.color": theme.text,
                "axes.labelcolor": theme.text, "xtick.color": theme.text, "ytick.color": theme.text}  # fmt: skip
    with pyplot.rc_context(settings):
        figure, all_axes = pyplot.subplots(
            len(groups), sharex=True, figsize=(4.4, 7.4) if is_narrow else (8.8, 5.2), facecolor=theme.background,
            height_ratios=[len(bars) for _, bars in groups], layout="constrained",
        )  # fmt: skip
        for axes, (title, bars) in zip(all_axes, groups, strict=True):
            names, values, kinds = zip(*bars, strict=True)
            places = range(len(bars))
            shades, height = [colours[kind] for kind in kinds], 0.42 if is_narrow else 0.66
            drawn = axes.barh(places, values, color=shades, height=height)
            axes.bar_label(drawn, [f"{value:.2f}x" for value in values], padding=4)
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
            axes.set_facecolor(theme.background)
            axes.set_yticks([] if is_narrow else places, [] if is_narrow else names)
            axes.invert_yaxis()
            axes.set_xlim(0, 1.15 * max(*large.values(), *(small[method][0] for method in CHART)))
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(theme.faint)
            axes.tick_params(axis="y", length=0)
            if is_narrow:
                for place, name in zip(places, names, strict=True):
                    axes.annotate(name, (0, place - 0.27), (3, 0), textcoords="offset points", va="bottom")
        label = "tokens per second relative to plain generate()"
        all_axes[-1].set_xlabel(label if is_narrow else f"{label}, with prompts")
        handles = [patches.Patch(color=colours[kind]) for kind in LEGEND]
        figure.legend(handles, LEGEND.values(), frameon=False, ncols=1 if is_narrow else 3, loc="outside upper center")
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)


def draw(options):
    """Draw all pictures in both themes."""
    paths = options.race, options.results, options.laptop
    recorded, results, laptop = (json.loads(path.read_text()) for path in paths)
    for name, theme in THEMES.items():
        for kind, layout in LAYOUTS.items():
            (options.docs / f"race{kind}-{name}.svg").write_text(Race(recorded, theme, layout).svg() + "\n")
            chart(results, laptop, theme, options.docs / f"speed{kind}-{name}.svg", is_narrow=layout.is_stacked)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="record the race")
    recording.add_argument("model", type=Path)
    recording.add_argument("name", help="of the model, for the picture")
    recording.add_argument("--json", type=Path, default=RESULTS / "race_cpu.json")
    recording.add_argument("--max-new-tokens", type=int, default=96)
    recording.add_argument("--rounds", type=int, default=5)
    recording.add_argument("--threads", type=int, default=torch.get_num_threads())
    recording.add_argument("--llama-server", type=Path, default=quantized.SERVER)
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
    drawing.add_argument("--race", type=Path, default=RESULTS / "race_cpu.json")
    drawing.add_argument("--laptop", type=Path, default=RESULTS / "quantized_cpu.json")
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
