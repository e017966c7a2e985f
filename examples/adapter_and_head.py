"""Use a LoRA adapter together with a head that was trained for the model without it.

    pip install peft
    python examples/adapter_and_head.py
    python examples/adapter_and_head.py --model org/model --adapter org/adapter --drafter org/head "What is rain?"

Prints tau with and without the adapter; the head usually drafts slightly worse with it. If the difference matters,
train a head on the adapted model's own answers. Without --adapter a new one is used, which changes nothing yet: it
only shows that the parts work together.

Expected output (tau depends on the machine: `auto` measures what drafting costs):

    The primary colours are: Red, Blue, and Yellow. They are the three primary colors that are used to create a ...
    with the adapter: tau ...
    without: tau ...
"""

import argparse

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import SpeculativeGenerationMixin, model_and_head


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Name the primary colours.", help="default: %(default)s")
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--adapter", help="path or Hub id of a PEFT adapter; default: a new, untrained one")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer; default: %(default)s")
    options = parser.parse_args()

    name, head = model_and_head(options.model, options.drafter)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, device_map="auto")
    if options.adapter:
        model = PeftModel.from_pretrained(model, options.adapter)
    else:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).eval()
    model = SpeculativeGenerationMixin.attach(model)
    method = model.load_drafter(head).method

    messages = [{"role": "user", "content": options.prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    settings = {"max_new_tokens": options.max_new_tokens, "do_sample": False, "speculative": method}
    ids = model.generate(**inputs, **settings)
    print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"with the adapter: tau {model.last_speculation.tau:.2f}")
    with model.disable_adapter():
        model.generate(**inputs, **settings)
        print(f"without: tau {model.last_speculation.tau:.2f}")


if __name__ == "__main__":
    main()
