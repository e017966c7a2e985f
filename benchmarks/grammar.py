"""JSON by 50 schemas: `auto` with and without the grammar's drafts, and plain decoding, each with the same processor.

    python benchmarks/grammar.py --json benchmarks/results/grammar_smollm2.json
    python benchmarks/grammar.py --model DIRECTORY/hf --json benchmarks/results/grammar_qwen.json

`json_schemas.jsonl` has tool calls, whose prompts contain the schema, and records and forms, whose prompts name the
fields. Batch size 1, greedy and sampled, `exact=True`: every answer must be plain decoding's. The modes take turns for
each schema and round in one process, and what they learn is kept apart; of the rounds the fastest counts. An
interrupted run resumes after the last finished schema. The default model is the packaged one with its head.
"""

import argparse
import importlib.metadata
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
import xgrammar
from xgrammar.contrib.hf import LogitsProcessor

from hf_specdec.bench.machine import OtherProcesses, versions
from hf_specdec.generation import loading
from hf_specdec.generation.state import state_of

SCHEMAS = Path(__file__).parent / "json_schemas.jsonl"
SAMPLING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.7, "top_p": 0.95}}


def fields(schema):
    """Return the names of a schema's fields as text, those of objects inside it in brackets."""
    inner = schema.get("items", schema).get("properties", {})
    return ", ".join(f"{name} ({below})" if (below := fields(each)) else name for name, each in inner.items())


def prompt(row):
    """Return the text that asks for the JSON of a row of `json_schemas.jsonl`."""
    if row["category"] == "tool":
        tool = json.dumps({"name": row["name"], "parameters": row["schema"]["properties"]["arguments"]})
        return f"You can call this tool:\n{tool}\n\n{row['request']}\n\nWrite the call as one line of JSON."
    return f"{row['request']}\n\nWrite this as one line of JSON with the fields {fields(row['schema'])}."


def measure(model, inputs, grammar, mode, options):
    """Return what one call took, and its answer."""
    others, begin = OtherProcesses(), time.perf_counter()
    ids = model.generate(**inputs, **options, speculative=mode, logits_processor=[LogitsProcessor(grammar)])
    seconds, stats = time.perf_counter() - begin, model.last_speculation
    answer = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return {"ids": answer, "seconds": seconds, "forwards": stats.num_target_forwards, "method": stats.method,
            "tokens_per_forward": len(answer) / stats.num_target_forwards, "others_cores": others.cores()}  # fmt: skip


def summarise(rows):
    """Return, for each kind of sampling and mode, means over the schemas and the ratios to the other modes."""
    summary = {}
    for sampling in SAMPLING:
        best = {}  # of the rounds: seconds by mode and schema
        kept = [row for row in rows if row["sampling"] == sampling]
        for row in kept:
            times = best.setdefault(row["mode"], {})
            times[row["schema"]] = min(row["seconds"], times.get(row["schema"], row["seconds"]))
        plain = {row["schema"]: row["ids"] for row in kept if row["mode"] == "plain"}
        for mode, times in best.items():
            entry = summary[f"{sampling}, {mode}"] = {
                "schemas": len(times),
                "different": sum(row["mode"] == mode and row["ids"] != plain[row["schema"]] for row in kept),
                "tokens_per_forward": statistics.mean(
                    row["tokens_per_forward"] for row in kept if row["mode"] == mode
                ),
            }
            for other in best:
                ratios = [best[other][name] / seconds for name, seconds in times.items()]
                entry[f"over {other}"] = {"mean": statistics.mean(ratios), "min": min(ratios), "max": max(ratios)}
    return summary


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or Hub id; default: the packaged model")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--schemas", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--any-whitespace", action="store_true", help="leave the whitespace to the model")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(options.model, None, getattr(torch, options.dtype))
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(vocabulary)
    without = [*model.drafters, "prompt_lookup", "token_recycling"]
    modes = {
        "plain": {"method": "plain", "exact": True},
        "auto without": {"method": "hybrid", "methods": without, "exact": True},
        "auto": {"method": "auto", "exact": True},
    }
    state = state_of(model)
    kept = dict.fromkeys(modes, state.state_dict())
    costs = {mode: [] for mode in modes}
    done = json.loads(options.json.read_text()) if options.json.exists() else {"rows": []}
    finished = {row["schema"] for row in done["rows"]}
    lines = [json.loads(line) for line in SCHEMAS.open()]
    spread = [line for start in range(17) for line in lines[start::17]][: options.schemas]
    left = [line for line in spread if line["name"] not in finished]
    for number, line in enumerate([*left[:1], *left]):  # the first one warms up
        inputs = loading.encode(tokenizer, prompt(line), model.device)
        schema = json.dumps(line["schema"])
        grammar, rows = compiler.compile_json_schema(schema, any_whitespace=options.any_whitespace), []
        for round_number in range(options.rounds):
            for name, sampling in SAMPLING.items():
                turn = (number + round_number) % len(modes)
                for mode in [*modes, *modes][turn : turn + len(modes)]:
                    state.load_state_dict(kept[mode])
                    state.costs = costs[mode]
                    torch.manual_seed(number)
                    call = {**sampling, "max_new_tokens": options.max_new_tokens}
                    found = measure(model, inputs, grammar, modes[mode], call)
                    kept[mode], costs[mode] = state.state_dict(), state.costs
                    place = {"schema": line["name"], "category": line["category"], "sampling": name, "mode": mode}
                    rows.append({**place, "round": round_number, **found})
        if number:
            facts = {**versions(model.device), "xgrammar": importlib.metadata.version("xgrammar")}
            done = {"environment": facts, "options": {**vars(options), "json": options.json.name},
                    "rows": [*done["rows"], *rows]}  # fmt: skip
            options.json.write_text(json.dumps({**done, "summary": summarise(done["rows"])}, indent=1))
            print(line["name"], time.strftime("%H:%M:%S"), flush=True)
    print("| | schemas | different | tokens per forward | over plain | over auto without | at least |")
    print("|---" * 7 + "|")
    for name, one in summarise(done["rows"]).items():
        plain, other = one["over plain"], one["over auto without"]
        figures = [one["tokens_per_forward"], plain["mean"], other["mean"], other["min"]]
        print(
            f"| {name} | {one['schemas']} | {one['different']} | {' | '.join(f'{value:.2f}' for value in figures)} |"
        )


if __name__ == "__main__":
    main()
