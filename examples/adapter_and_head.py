"""Use a LoRA adapter together with a head that was trained for the model without it.

    pip install peft
    python examples/adapter_and_head.py
    python examples/adapter_and_head.py --model org/model --adapter org/adapter --drafter org/head "What is rain?"

Prints tau with and without the adapter; the head usually drafts slightly worse with it. If the difference matters,
train a head on the adapted model's own answers. Without --adapter a new one is used, which changes nothing yet: it
only shows that the parts work together.

Expected output, with the new adapter (tau depends on the machine: `auto` measures what drafting costs):

    The primary colours are: Red, Blue, and Yellow. They are the three primary colors that are used to create a ...
    with the adapter (new: it changes nothing): tau ...
    without: tau ...
"""

import argparse
import warnings

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, model_and_head

PROMPT = "Name the primary colours."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="default: %(default)s")
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--adapter", help="path or Hub id of a PEFT adapter; default: a new, untrained one")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer; default: %(default)s")
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    try:
        from peft import LoraConfig, PeftModel, get_peft_model
    except ImportError as error:
        raise SystemExit(f"This example needs peft: pip install peft ({error})") from error
    # PEFT uses a name that transformers has renamed
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
    try:
        name, head = model_and_head(options.model, options.drafter)
        if head is None:
            parser.error("give the head of this model: --drafter")
        tokenizer = AutoTokenizer.from_pretrained(name)
        if tokenizer.chat_template is None:
            parser.error(f"The model {name!r} has no chat template. Give an instruct model: --model.")
        model = AutoModelForCausalLM.from_pretrained(name)
        if options.adapter:
            model = PeftModel.from_pretrained(model, options.adapter)
        else:
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).eval()
        if torch.accelerator.is_available():
            model = model.to(torch.accelerator.current_accelerator())
        model = SpeculativeGenerationMixin.attach(model)
        method = model.load_drafter(head).method
    except (OSError, ValueError, SpeculativeDecodingError) as error:  # OSError, ValueError: no such model or adapter
        parser.error(str(error))
    messages = [{"role": "user", "content": options.prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    settings = {"max_new_tokens": options.max_new_tokens, "do_sample": False, "speculative": method}
    ids = model.generate(**inputs, **settings)
    print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    new = "" if options.adapter else " (new: it changes nothing)"
    print(f"with the adapter{new}: tau {model.last_speculation.mean_accepted_length:.2f}")
    with model.disable_adapter():
        model.generate(**inputs, **settings)
        print(f"without: tau {model.last_speculation.mean_accepted_length:.2f}")


if __name__ == "__main__":
    main()
