"""Use a LoRA adapter together with a head that was trained for the model without it.

    python examples/adapter_and_head.py --model org/model --adapter org/adapter --drafter org/head "Why is it blue?"

Prints tau with and without the adapter; the head usually drafts slightly worse with it. If the difference matters,
train a head on the adapted model's own answers.
"""

import argparse

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import SpeculativeGenerationMixin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    base = AutoModelForCausalLM.from_pretrained(options.model)
    model = SpeculativeGenerationMixin.attach(PeftModel.from_pretrained(base, options.adapter))
    name = model.load_drafter(options.drafter).method
    inputs = tokenizer(options.prompt, return_tensors="pt")
    settings = {"max_new_tokens": options.max_new_tokens, "do_sample": False, "speculative": name}
    ids = model.generate(**inputs, **settings)
    print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"with the adapter: tau {model.last_speculation.mean_accepted_length:.2f}")
    with model.disable_adapter():
        model.generate(**inputs, **settings)
        print(f"without: tau {model.last_speculation.mean_accepted_length:.2f}")


if __name__ == "__main__":
    main()
