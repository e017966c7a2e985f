"""Everything that only a GPU can show, in one run: which forwards become graphs, what a step costs, what tau is worth.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json

Parts, each of which may be named alone (`--parts capture oracle`): `capture`, tiny models of many architectures, their
forward replayed beside itself, bit by bit; `reads`, how often a step of the small model waits for the device; `small`,
the packaged model with its heads, by form of the forward; `oracle`, a Llama of random weights and a drafter that knows
the answer, against plain decoding, plain decoding compiled, and the time of reading all weights once; `memory`, what
graphs of each width keep. What this machine cannot show is written down as "not measured", and why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hf_specdec import SpeculativeGenerationMixin, loading
from hf_specdec.bench.machine import commit
from hf_specdec.target.compiling import make_runner
from hf_specdec.target.graph_forward import GraphForward
from hf_specdec.target.graphs import RECORDERS, WIDTHS
from hf_specdec.target.model import execution_device
from hf_specdec.target.probe import inspect_target
from hf_specdec.target.runners import CannotRecordError
from hf_specdec.target.tree_target import TreeTarget
from hf_specdec.tree import TokenTree

sys.path.insert(0, str(Path(__file__).parent))
from oracle import OracleDrafter, make_sure

ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "starcoder2", "granite",
    "gpt_neox", "gpt2", "opt", "falcon", "stablelm", "cohere", "glm4", "smollm3", "qwen2_moe", "qwen3_moe",
    "mixtral", "deepseek_v3",
)  # fmt: skip
TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
FORMS = ("none", "cuda_graph", "compile")
NOT_MEASURED = "not measured"


def needs_graphs(part: Callable[..., Any]) -> Callable[..., Any]:
    """Tell, where the device records no graphs, that a part was not measured."""

    def measured(device: torch.device, options: Any) -> Any:
        if device.type not in RECORDERS:
            return f"{NOT_MEASURED}: {device} records no graphs"
        return part(device, options)

    return measured


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def seconds_of(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The median of some runs, after two that are not timed."""
    taken = []
    for _ in range(rounds + 2):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


@torch.no_grad()
def verify_often(model: Any, runner: Any, widths: Sequence[int], context: int, times: int) -> dict[int, torch.Tensor]:
    """The logits of the last of several forwards over chains, by width."""
    facts, device = inspect_target(model), execution_device(model)
    target = facts.new_target(model, context + max(widths), max(widths), runner=runner)
    assert isinstance(target, TreeTarget)
    ids = torch.arange(3, 3 + context + max(widths), device=device)[None] % model.config.vocab_size
    inputs = {"attention_mask": torch.ones_like(ids[:, :context]), "past_key_values": target.cache}
    target.prefill(ids[:, :context], model.generation_config, {**inputs, "use_cache": True})
    found = {}
    for width in widths:
        tree = TokenTree(ids[:, context : context + width], torch.arange(width, device=device) - 1)
        for _ in range(times):
            found[width] = target.verify(tree).logits
            target.rollback(width)
    return found


def tiny(name: str, device: torch.device) -> Any:
    """A model of an architecture at its smallest; sizes that its configuration does not know are left out."""
    torch.manual_seed(0)
    default = AutoConfig.for_model(name)
    known = {*default.to_dict(), *default.attribute_map}
    config = AutoConfig.for_model(name, **{key: value for key, value in TINY.items() if key in known})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().to(device)


@needs_graphs
def capture(device: torch.device, options: Any) -> dict[str, str]:
    """By architecture: "bitwise", how far a replay is from the same forward unrecorded, or why there is none."""
    found = {}
    for name in options.architectures:
        try:
            model = tiny(name, device)
            runner = make_runner(model, inspect_target(model), frozenset(), "cuda_graph")
            once, often = (verify_often(model, runner, (1, 8), 40, times) for times in (1, 6))
            distance = max(float((often[width] - once[width]).abs().max()) for width in once)
            recorded = isinstance(runner, GraphForward) and runner.recorded()
            found[name] = (
                ("bitwise" if distance == 0 else f"differs by {distance:.1e}") if recorded else "not recorded"
            )
        except CannotRecordError as error:
            found[name] = f"refused: {error}"
        except Exception as error:  # a model that this version makes in another way is one line of the report
            found[name] = f"failed: {type(error).__name__}: {str(error)[:120]}"
    return found


@needs_graphs
def reads(device: torch.device, options: Any) -> dict[str, float]:
    """Per step of the small model with its head: waits of the host, and kernels or graphs started."""
    model, inputs, _ = small_model(device, options)
    model.generate(**inputs, max_new_tokens=64, do_sample=False, speculative="eagle")
    with torch.profiler.profile() as profiler:
        model.generate(**inputs, max_new_tokens=64, do_sample=False, speculative="eagle")
    steps, counts = model.last_speculation.num_target_forwards, {"waits": 0, "launches": 0, "graphs": 0}
    for event in profiler.events():
        counts["waits"] += event.name.endswith(("StreamSynchronize", "EventSynchronize"))
        counts["launches"] += event.name.endswith("LaunchKernel")
        counts["graphs"] += event.name.endswith("GraphLaunch")
    return {name: count / steps for name, count in counts.items()}


def small_model(device: torch.device, options: Any) -> tuple[Any, Any, Any]:
    """The packaged model with its head, or another; the inputs of a prompt; the tokenizer."""
    model, tokenizer = loading.load_model(options.small_model, None, torch.bfloat16)
    model = model.to(device)
    return model, loading.encode(tokenizer, "Explain in detail how a compiler works.", device), tokenizer


def small(device: torch.device, options: Any) -> dict[str, Any]:
    """Tokens per second and tau of the packaged model: plain, and every method in every form of the forward."""
    model, inputs, _ = small_model(device, options)
    count, found = options.max_new_tokens, {}

    def run(speculative: Any) -> Any:
        return model.generate(**inputs, max_new_tokens=count, do_sample=False, speculative=speculative)

    length = inputs["input_ids"].shape[1]
    found["plain"] = {"tokens_per_second": (run(None).shape[1] - length) / seconds_of(lambda: run(None), device, 3)}
    forms = [form for form in FORMS if device.type in RECORDERS or form == "none"]
    for method in ("eagle", "prompt_lookup", "auto") if model.drafters else ("prompt_lookup", "auto"):
        for form in forms:
            config = {"method": method, "compile": form}
            seconds = seconds_of(lambda config=config: run(config), device, 3)
            stats = model.last_speculation
            found[f"{method}, {form}"] = {
                "tokens_per_second": stats.num_generated_tokens / seconds, "tau": stats.mean_accepted_length
            }  # fmt: skip
    return found


def roofline(model: Any, device: torch.device) -> float:
    """Seconds of reading all weights but the embedding once, at the speed of copying within the device."""
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    block = torch.empty(max(weights // 8, 1 << 20), dtype=torch.uint8, device=device)
    seconds = seconds_of(lambda: block.clone(), device, 5)
    return weights * seconds / (2 * block.nbytes)


def oracle(device: torch.device, options: Any) -> dict[str, Any]:
    """Tokens per second by tau, nodes, rows and form, with what plain decoding reaches and the memory allows."""
    torch.manual_seed(0)
    sizes = dict(zip(LLAMA_8B, options.llama_sizes, strict=True)) if options.llama_sizes else LLAMA_8B
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
        finally:
            torch.set_default_dtype(default)
    model.generation_config.eos_token_id = None
    model = SpeculativeGenerationMixin.attach(make_sure(model))
    count, rows = options.max_new_tokens, []
    found = {"roofline_seconds_per_forward": roofline(model, device), "rows": rows}
    for batch in options.batches:
        ids = torch.arange(5, 5 + 64 * batch, device=device).view(batch, 64) % model.config.vocab_size
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def run(count: int = count, inputs: Any = inputs, **how: Any) -> Any:
            return model.generate(**inputs, max_new_tokens=count, do_sample=False, **how)

        answers = run()[:, 64:]
        plain = {"plain": {}}
        if device.type in RECORDERS:
            plain["plain, static and compiled"] = {"cache_implementation": "static"}
        for name, how in plain.items():
            seconds = seconds_of(lambda how=how, run=run: run(**how), device, 3)
            rows.append({"batch": batch, "method": name, "tokens_per_second": batch * count / seconds})
        for form in FORMS[:2] if device.type in RECORDERS else FORMS[:1]:
            for nodes in options.nodes:
                for tau in options.taus:
                    if tau - 1 > nodes - 1:
                        continue
                    model.add_drafter(OracleDrafter(answers, tau))
                    how = {"speculative": {"method": "oracle", "num_draft_tokens": nodes, "compile": form}}
                    seconds = seconds_of(lambda how=how, run=run: run(**how), device, 3)
                    stats = model.last_speculation
                    rows.append({
                        "batch": batch, "method": f"oracle, {form}", "nodes": nodes, "wanted_tau": tau,
                        "tau": stats.mean_accepted_length, "tokens_per_second": batch * count / seconds,
                        "milliseconds_per_step": 1000 * seconds / stats.num_target_forwards,
                    })  # fmt: skip
    return found


@needs_graphs
def memory(device: torch.device, options: Any) -> dict[int, float]:
    """MiB that the device lost to the graphs of each width, of the small model."""
    model, _, _ = small_model(device, options)
    module, found = torch.get_device_module(device), {}
    runner = make_runner(model, inspect_target(model), frozenset(), "cuda_graph")
    for width in WIDTHS:
        module.empty_cache()
        before = module.mem_get_info(device)[0]
        verify_often(model, runner, (width,), 512, 6)
        module.empty_cache()
        found[width] = (before - module.mem_get_info(device)[0]) / 2**20
    return found


PARTS = {"capture": capture, "reads": reads, "small": small, "oracle": oracle, "memory": memory}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--small-model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--llama-sizes", type=float, nargs=len(LLAMA_8B), metavar="N", help=f"instead of {LLAMA_8B}")
    parser.add_argument("--taus", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.5, 6.0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.llama_sizes:
        options.llama_sizes = [*map(int, options.llama_sizes[:-1]), options.llama_sizes[-1]]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found_device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = found_device or torch.device("cpu")
    report: dict[str, Any] = dict.fromkeys(PARTS, NOT_MEASURED)
    report["device"] = str(device) if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    report["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    report["commit"] = commit()
    for name in options.parts:
        report[name] = PARTS[name](device, options)
        options.json.write_text(json.dumps(report, indent=1) + "\n")  # whatever follows may fail
        print(name, json.dumps(report[name], indent=1), flush=True)


if __name__ == "__main__":
    main()
