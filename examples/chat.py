"""Chat in the terminal, with streaming, one cache for the whole conversation, and tau after every answer.

    python examples/chat.py
    python examples/chat.py --model org/model --drafter org/head

Each turn passes the cache of the previous turns, so only new tokens are read. If the chat template rewrites earlier
turns, the whole conversation is read again. Ctrl-C stops an answer and drops its question; an empty line, Ctrl-D or
Ctrl-C at the prompt ends the chat.

Expected output (answers and tau may differ with the machine, because the packaged model runs in bf16):

    > Write a Python function that returns the mean of a list of numbers.
    ```python
    def calculate_mean(numbers):
        return sum(numbers) / len(numbers) if numbers else None
    ```

    This function uses the built-in `sum` function to calculate the sum of the list of numbers, ...
        [tau ..., ... tokens/s]
    >
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, model_and_head

DTYPES = ("auto", "float32", "bfloat16", "float16")


def ask():
    """Return what the user types; an empty string at the end of the input and after Ctrl-C."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of each answer; default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights; default: the checkpoint's")
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    try:
        name, head = model_and_head(options.model, options.drafter)
        tokenizer = AutoTokenizer.from_pretrained(name)
        if tokenizer.chat_template is None:
            parser.error(f"The model {name!r} has no chat template. Give an instruct model: --model.")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=options.dtype)
        if torch.accelerator.is_available():
            model = model.to(torch.accelerator.current_accelerator())
        SpeculativeGenerationMixin.attach(model)
        if head:
            model.load_drafter(head)
    except (OSError, SpeculativeDecodingError) as error:
        parser.error(str(error))
    messages, cache, read = [], DynamicCache(config=model.config), []
    while message := ask():
        messages.append({"role": "user", "content": message})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        prompt = inputs["input_ids"][0].tolist()
        if prompt[: len(read)] != read:
            cache = DynamicCache(config=model.config)
        try:
            ids = model.generate(
                **inputs, cache=cache, max_new_tokens=options.max_new_tokens, do_sample=False, speculative="auto",
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            )[0].tolist()  # fmt: skip
        except KeyboardInterrupt:
            print("\n    [stopped]")
            messages.pop()
            cache, read = DynamicCache(config=model.config), []  # it contains a part of the dropped turn
            continue
        read = ids[:-1]  # the cache does not contain the last token yet
        messages.append(
            {"role": "assistant", "content": tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)}
        )
        stats = model.last_speculation
        print(f"    [tau {stats.mean_accepted_length:.2f}, {stats.tokens_per_second:.1f} tokens/s]")


if __name__ == "__main__":
    main()
