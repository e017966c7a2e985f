"""Use speculation with transformers' `pipeline`.

    python examples/text_pipeline.py
    python examples/text_pipeline.py --model org/model --drafter org/head "Why is the sky blue?"

Expected output (tau depends on the machine: `auto` measures what drafting costs):

    ```python
    def calculate_mean(numbers):
        return sum(numbers) / len(numbers) if numbers else None
    ...
        [tau ...]
    The primary colours are: Red, Blue, and Yellow. They are the three primary colors that are used to create a ...
        [tau ...]
"""

import argparse

from transformers import AutoTokenizer, pipeline

from hf_specdec import AutoSpeculativeModelForCausalLM, model_and_head

QUESTIONS = ["Write a Python function that returns the mean of a list of numbers.", "Name the primary colours."]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="default: two questions")
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer; default: %(default)s")
    options = parser.parse_args()

    name, head = model_and_head(options.model, options.drafter)
    model = AutoSpeculativeModelForCausalLM.from_pretrained(name, drafter=head, dtype="auto", device_map="auto")
    ask = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(name))
    for question in options.questions:
        chat = [{"role": "user", "content": question}]
        (found,) = ask(chat, max_new_tokens=options.max_new_tokens, do_sample=False, speculative="auto")
        print(found["generated_text"][-1]["content"])
        print(f"    [tau {model.last_speculation.tau:.2f}]")


if __name__ == "__main__":
    main()
