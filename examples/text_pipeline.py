"""Use speculation with transformers' `pipeline`.

python examples/text_pipeline.py --model org/model --drafter org/head "Why is the sky blue?"
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from hf_specdec import SpeculativeGenerationMixin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(options.model))
    if options.drafter:
        model.load_drafter(options.drafter)
    ask = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(options.model))
    for question in options.questions:
        chat = [{"role": "user", "content": question}]
        (found,) = ask(chat, max_new_tokens=options.max_new_tokens, do_sample=False, speculative="auto")
        print(found["generated_text"][-1]["content"])
        print(f"    [tau {model.last_speculation.mean_accepted_length:.2f}]")


if __name__ == "__main__":
    main()
