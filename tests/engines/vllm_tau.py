"""Run by the Python of an environment with vLLM: an exported head, served with its target, and its accepted length.

    python vllm_tau.py MODEL HEAD PROMPTS.json NUM_SPECULATIVE_TOKENS [METHOD]

PROMPTS: a list of lists of token ids. Prints a JSON object: vLLM's version, the answers' ids, tau (one plus the
accepted tokens per draft).
"""

import json
import sys
from importlib.metadata import distributions
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    model, head, prompts, steps = sys.argv[1:5]
    method = sys.argv[5] if len(sys.argv) > 5 else "eagle3"
    speculation = {"model": head, "method": method, "num_speculative_tokens": int(steps)}
    llm = LLM(
        model=model,
        speculative_config=None if head == "none" else speculation,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
    )
    asked = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]
    answers = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    drafts = counters.get("vllm:spec_decode_num_drafts") or 0
    accepted = counters.get("vllm:spec_decode_num_accepted_tokens") or 0
    installed = {d.metadata["Name"]: d.version for d in distributions()}
    report = {
        "vllm": next(version for name, version in installed.items() if name.startswith("vllm")),
        "tau": 1 + accepted / drafts if drafts else None,
        "drafts": drafts,
        "ids": [list(answer.outputs[0].token_ids) for answer in answers],
    }
    sys.stdout.write("REPORT " + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
