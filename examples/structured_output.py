"""Generate JSON of a given schema with speculation, constrained by a logits processor of xgrammar.

    pip install xgrammar
    python examples/structured_output.py
    python examples/structured_output.py --model org/model --drafter org/head "Describe a dog as JSON."

A grammar processor is stateful, so it is called exactly as in plain `generate()`: once per token of the answer, in
order, and never on a rejected draft. In float32 the answer equals plain `generate()`'s; the script checks it.

Expected output (tau depends on the machine: `auto` measures what drafting costs):

    {"name": "Felix", "colours": ["red", "black", "white", "brown"], "legs": 4}
    the same ids: True
    SpeculationStats(hybrid: 37 tokens in ... target forwards, tau ..., ... tokens/s; ...)
"""

import argparse
import json

import torch
import xgrammar
from transformers import AutoTokenizer
from xgrammar.contrib.hf import LogitsProcessor

from hf_specdec import AutoSpeculativeModelForCausalLM, model_and_head

QUESTION = "Describe a cat as JSON with its name, its colours and how many legs it has."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "colours": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 4},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "colours", "legs"],
    "additionalProperties": False,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default=QUESTION, help="default: about a cat")
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    options = parser.parse_args()

    name, head = model_and_head(options.model, options.drafter)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoSpeculativeModelForCausalLM.from_pretrained(name, drafter=head, dtype="float32", device_map="auto")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    # without arbitrary whitespace, which a small model would generate endlessly
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    messages = [{"role": "user", "content": options.question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    answers = [
        model.generate(
            **inputs, max_new_tokens=200, do_sample=False, speculative=speculative,
            logits_processor=[LogitsProcessor(grammar)],  # stateful: use a new one for each call
        )
        for speculative in (None, "auto")
    ]  # fmt: skip
    print(tokenizer.decode(answers[1][0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print("the same ids:", torch.equal(*answers))
    print(model.last_speculation)


if __name__ == "__main__":
    main()
