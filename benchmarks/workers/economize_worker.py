"""economize: prompt lookup, or plain decoding (`cycle_length` 1). Settings: model, dtype, threads, eos_ids."""

import economize
import torch
from economize.techniques.lookup import LookupConfig
from protocol import FirstToken, serve
from transformers import AutoModelForCausalLM


def load(settings):
    torch.set_num_threads(settings["threads"])
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
    cycle, eos_ids, first = settings["cycle_length"], set(settings["eos_ids"]), FirstToken()
    model = economize.apply(base, *([LookupConfig()] if cycle > 1 else []))
    # without drafts tokens are read one at a time, so that the time of the first is known
    decoding = economize.DecodeConfig(cycle_length=cycle, sync_interval=1)

    def stop(tokens):
        first.seen()
        return int(tokens[-1]) in eos_ids

    def answer(prompt_ids, max_new_tokens):
        first.begin()
        result = model.decode(torch.tensor(prompt_ids), max_new_tokens, decoding=decoding, stop=stop)
        ids, passes = result.tokens.tolist(), result.cost_summary()["exact_calls"]  # including the prefill
        return ids, first.seconds, (len(ids) - 1) / (passes - 1) if passes > 1 else None

    return answer


if __name__ == "__main__":
    serve(load, ["economize", "torch", "transformers"])
