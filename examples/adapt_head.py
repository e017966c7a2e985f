"""Keep training a head on the answers of recent calls about one subject, and measure whether that pays.

    pip install -e '.[training]'
    python examples/adapt_head.py --model org/model --drafter org/head --prompts reviews.jsonl --work work

The prompts are answered in rounds: all with the original head, then all again, now with a copy of it that continues
its training on the answers of the rounds before. Each pass begins with a freshly attached model, because "auto" also
learns from answers. Answers do not depend on the head. Printed are tokens per forward (tau), tokens per second and the
seconds that training took: it pays if they are earned back.

What came out for Qwen2.5-Coder-0.5B and 200 reviews of one project's functions is in docs/training.md.
"""

import argparse
import copy
import time
from pathlib import Path

import torch

from hf_specdec import SpeculativeGenerationMixin, load_head, training
from hf_specdec.generation.loading import encode_chat, load_target


def answer(model, tokenizer, prompts, max_new_tokens):
    """Answer the prompts; return the answers as conversations, tau, and tokens per second."""
    talks, forwards, begin = [], 0, time.perf_counter()
    for prompt in prompts:
        inputs = encode_chat(tokenizer, prompt.turns, model.device)
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, speculative="auto")[0].tolist()
        length = inputs["input_ids"].shape[1]
        talks.append(training.Conversation.of(ids[:length], ids[length:]))
        forwards += model.last_speculation.num_target_forwards
    tokens = sum(sum(talk.loss_mask) for talk in talks)
    return talks, tokens / forwards, tokens / (time.perf_counter() - begin)


def adapt(model, head, talks, folder, options):
    """Return a copy of the head that was trained on the conversations."""
    arguments = training.head_arguments(
        folder / "run", {"save_strategy": "no"}, num_train_epochs=options.epochs, per_device_train_batch_size=4,
        learning_rate=options.learning_rate,
    )  # fmt: skip
    layers = (*head.feature_layers, training.LAST)
    store = training.capture_features(model, talks, folder / "features", layers=layers)
    return training.train_eagle(model, copy.deepcopy(head).requires_grad_(), store, arguments).to(model.dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path, GGUF file (activations are rounded) or Hub id")
    parser.add_argument("--drafter", required=True, help="an EAGLE head for it")
    parser.add_argument("--prompts", required=True, help="JSON lines with `prompt`, about one subject")
    parser.add_argument("--work", type=Path, required=True, help="a new directory, for features and runs")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    options = parser.parse_args()
    model, tokenizer = load_target(options.model, torch.bfloat16, round_activations=True)
    head = load_head(options.drafter, dtype=model.dtype)
    prompts = training.read_prompts(options.prompts)
    for name in ("original", "adapted"):
        SpeculativeGenerationMixin.attach(model).load_drafter(head, verify=False)
        talks, spent = [], 0.0
        for number in range(options.rounds):
            if talks and name == "adapted":
                begin = time.perf_counter()
                adapted = adapt(model, head, talks, options.work / str(number), options)
                model.remove_drafter("eagle")
                model.load_drafter(adapted, verify=False)
                spent += time.perf_counter() - begin
                print(f"trained on {len(talks)} answers, {spent:.0f} s in all", flush=True)
            new, tau, speed = answer(model, tokenizer, prompts[number :: options.rounds], options.max_new_tokens)
            talks += new
            print(f"round {number + 1}, {name}: tau {tau:.2f}, {speed:.1f} tokens/s", flush=True)
        SpeculativeGenerationMixin.detach(model)  # forget what "auto" learned from these answers


if __name__ == "__main__":
    main()
