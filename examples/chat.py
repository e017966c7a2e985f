"""Chat in the terminal, with streaming, one cache for the whole conversation, and tau after every answer.

    python examples/chat.py
    python examples/chat.py --model org/model --drafter org/head
    python examples/chat.py --model path/to/model.gguf    # stays packed, on the CPU, with rounded activations

Each turn passes the cache of the previous turns, so only new tokens are read. If the chat template rewrites earlier
turns, the whole conversation is read again. An empty line, Ctrl-C or Ctrl-D ends the chat.

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
from contextlib import suppress
from pathlib import Path

from transformers import AutoTokenizer, DynamicCache, TextStreamer

from hf_specdec import AutoSpeculativeModelForCausalLM, SpeculativeGenerationMixin, load_gguf, model_and_head


def load(name, head):
    """Return the model with speculation and its head, and the tokenizer."""
    if not name.endswith(".gguf"):
        model = AutoSpeculativeModelForCausalLM.from_pretrained(name, drafter=head, dtype="auto", device_map="auto")
        return model, AutoTokenizer.from_pretrained(name)
    model = SpeculativeGenerationMixin.attach(load_gguf(name, dtype="bfloat16", round_activations=True))
    if head:
        model.load_drafter(head)
    return model, AutoTokenizer.from_pretrained(Path(name).parent, gguf_file=Path(name).name)


def chat(model, tokenizer, max_new_tokens):
    """Answer what the user types until an empty line."""
    messages, cache, read = [], DynamicCache(config=model.config), []
    while message := input("> ").strip():
        messages.append({"role": "user", "content": message})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        prompt = inputs["input_ids"][0].tolist()
        if prompt[: len(read)] != read:
            cache = DynamicCache(config=model.config)
        ids = model.generate(
            **inputs, cache=cache, max_new_tokens=max_new_tokens, do_sample=False, speculative="auto",
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )[0].tolist()  # fmt: skip
        read = ids[:-1]  # the cache does not contain the last token yet
        answer = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        stats = model.last_speculation
        print(f"    [tau {stats.tau:.2f}, {stats.tokens_per_second:.1f} tokens/s]")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of each answer; default: %(default)s")
    options = parser.parse_args()

    model, tokenizer = load(*model_and_head(options.model, options.drafter))
    with suppress(EOFError, KeyboardInterrupt):
        chat(model, tokenizer, options.max_new_tokens)


if __name__ == "__main__":
    main()
