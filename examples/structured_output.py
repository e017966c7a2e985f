"""An answer that is JSON of a given schema, drafted several tokens at a time: a logits processor of xgrammar.

    pip install xgrammar
    python examples/structured_output.py --model org/model --drafter org/head "Describe a cat as JSON."

A grammar's processor remembers the text that it has seen, so it is called once per token of the answer, in order, as
plain `generate()` calls it: never on a draft that is refused. The answer is plain's.
"""

import argparse
import json

import torch
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer
from xgrammar.contrib.hf import LogitsProcessor

from hf_specdec import SpeculativeGenerationMixin

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
    parser.add_argument("question")
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(options.model))
    if options.drafter:
        model.load_drafter(options.drafter)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    # no room for spaces and line ends that say nothing: a small model would go on with them for ever
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    messages = [{"role": "user", "content": options.question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    answers = []
    for speculative in (None, "auto"):
        answers.append(model.generate(
            **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=speculative,
            logits_processor=[LogitsProcessor(grammar)],  # one per call: it cannot be used again
        ))  # fmt: skip
    text = tokenizer.decode(answers[1][0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(json.dumps(json.loads(text), indent=2, ensure_ascii=False))
    print("the same ids:", torch.equal(*answers))
    print(model.last_speculation)


if __name__ == "__main__":
    main()
