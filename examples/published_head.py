"""Load a published EAGLE-3 head for a model of 8B parameters, and compare the speeds with and without it.

    python examples/published_head.py
    python examples/published_head.py --model meta-llama/Llama-3.1-8B-Instruct --head HEAD

HEAD is, for example, yuhuili/EAGLE3-LLaMA3.1-Instruct-8B; `hf-specdec find Qwen/Qwen3-8B` lists the heads of a model.
The layout of a head is recognised: that of the first command's is speculators', that of yuhuili's EAGLE's own. Model
and head are about 18 GB in bf16. This script was run only on a tiny model with a head in each of these layouts.

Output (values vary); tau is the number of tokens per forward:

    ... (the answer)
    plain: 256 tokens, ... s, ... tokens/s, tau 1.00
    ... (the answer again; in half precision it may differ after a near-tie)
    auto: 256 tokens, ... s, ... tokens/s, tau ...
    forwards by: cuda_graph    ("eager": nothing was captured, and a warning says why)
"""

import argparse

from transformers import AutoTokenizer

from hf_specdec import AutoSpeculativeModelForCausalLM
from hf_specdec.viz import LiveStreamer

QUESTION = "Write a Python function that returns the mean of a list of numbers, and explain it line by line."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default=QUESTION, help="default: about a Python function")
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="path or Hub id; default: %(default)s")
    parser.add_argument("--head", default="RedHatAI/Qwen3-8B-speculator.eagle3", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of each answer; default: %(default)s")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoSpeculativeModelForCausalLM.from_pretrained(
        options.model, drafter=options.head, dtype="auto", device_map="auto"
    )
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.question}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True, enable_thinking=False,  # the head of Qwen3-8B was trained on answers without thinking
    ).to(model.device)  # fmt: skip
    model.warmup()  # one-time work, so that it is not timed
    for speculative in (None, "auto"):
        model.generate(
            **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=speculative,
            streamer=LiveStreamer(tokenizer, speculative or "plain"),
        )  # fmt: skip
    print("forwards by:", model.last_speculation.forwards)


if __name__ == "__main__":
    main()
