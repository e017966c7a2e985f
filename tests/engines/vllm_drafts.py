"""Run by the Python of an environment with vLLM: what vLLM drafts with an exported head, served with its target.

    python vllm_drafts.py MODEL HEAD METHOD STEPS PROMPTS.json OUT.json [DTYPE]

PROMPTS is a list of lists of token ids, STEPS the number of tokens in a chain. OUT is a JSON object: vLLM's version,
`ids` (the answers), `drafts` (of each answer, the chains in the order of drafting), and tau (one plus the accepted
tokens per draft; vLLM also counts tokens behind the requested ones).

One change: on the CPU, vLLM 0.32 normalises the keys of the context of all layers of a block head with the weights
of the first layer. Here each layer has its own.
"""

import json
import os
import sys
from importlib.metadata import distributions
from pathlib import Path

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(SETTINGS)

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm import _custom_ops as operations  # noqa: E402
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model  # noqa: E402
from vllm.v1.spec_decode import llm_base_proposer, medusa  # noqa: E402

TOKENS = 64


def normalize_context_keys(self, keys):
    """Normalise the keys of each layer with the layer's own weights."""
    out = torch.empty_like(keys)
    for layer, weights in enumerate(self._k_norm_weights):
        operations.rms_norm(out[layer], keys[layer].contiguous(), weights.contiguous(), self._rms_norm_eps)
    return out


def record_drafts(proposer, drafts):
    """Append all that a class of proposers drafts to a list."""
    original = proposer.propose

    def propose(self, *arguments, **options):
        drafted = original(self, *arguments, **options)
        drafts.append(drafted[0].tolist())
        return drafted

    proposer.propose = propose


def main() -> None:
    model, head, method, steps, prompts, out = sys.argv[1:7]
    drafts, report = [], {"ids": [], "drafts": []}
    DFlashQwen3Model._normalize_context_k = normalize_context_keys
    for proposer in (llm_base_proposer.SpecDecodeBaseProposer, medusa.MedusaProposer):
        record_drafts(proposer, drafts)
    llm = LLM(
        model=model,
        speculative_config={"model": head, "method": method, "num_speculative_tokens": int(steps)},
        dtype=sys.argv[7] if len(sys.argv) > 7 else "float32",
        max_model_len=512,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    asked = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    for ids in json.loads(Path(prompts).read_text()):
        drafts.clear()
        (answer,) = llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
        report["ids"].append(list(answer.outputs[0].token_ids))
        report["drafts"].append(list(drafts))
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    accepted, steps = (counters[f"vllm:spec_decode_num_{name}"] for name in ("accepted_tokens", "drafts"))
    installed = {package.metadata["Name"]: package.version for package in distributions()}
    version = next(version for name, version in installed.items() if name.startswith("vllm"))
    Path(out).write_text(json.dumps({"vllm": version, "tau": 1 + accepted / steps, **report}))


if __name__ == "__main__":
    main()
