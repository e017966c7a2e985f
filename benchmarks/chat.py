"""Check and time a chat of several turns that shares one cache and is streamed from a thread.

    python benchmarks/chat.py --json chat.json

float32, greedy. Speculative and plain turns alternate on the same DynamicCache; each answer is compared with a plain
`generate()` over the whole chat with a new cache. Then every method runs the whole chat, to time it.
"""

import argparse
import json
import threading
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache, TextIteratorStreamer

from hf_specdec import bench
from hf_specdec.generation import loading

TURNS = [
    "Name three primary colours and say what each reminds you of.",
    "Which of them is the colour of the sky?",
    "Repeat your first answer as a numbered list.",
    "Translate the list into French.",
    "How many letters has the first word of the list?",
    "Thank you. Sum up our chat in one sentence.",
]


def answer_into(answers, model, options, method):
    answers.append(model.generate(**options, speculative=method))


def chat(model, tokenizer, methods, max_new_tokens):
    """Return every turn's token ids, duration, and arrival times of its text."""
    cache, messages, turns = DynamicCache(config=model.config), [], []
    for turn, method in zip(TURNS, methods, strict=True):
        messages.append({"role": "user", "content": turn})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        options = {**inputs, "cache": cache, "max_new_tokens": max_new_tokens, "do_sample": False}
        answers = []
        thread = threading.Thread(target=answer_into, args=(answers, model, {**options, "streamer": streamer}, method))
        begin = time.perf_counter()
        thread.start()
        arrivals, text = [], ""
        for piece in streamer:
            if piece:
                arrivals.append(round(time.perf_counter() - begin, 3))
                text += piece
        thread.join()
        turns.append({
            "method": method, "seconds": time.perf_counter() - begin, "arrivals": arrivals, "text": text,
            "ids": answers[0][0].tolist(), "cached": cache.get_seq_length(), "prompt": inputs["input_ids"],
            "tau": model.last_speculation.mean_accepted_length if method else None,
        })  # fmt: skip
        messages.append({"role": "assistant", "content": text})
    return turns


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, None, torch.float32)
    record = {"environment": bench.environment(model), "chats": []}
    mixed = ["eagle", None, "prompt_lookup", "eagle", None, "prompt_lookup"]
    for methods in (mixed, ["eagle"] * 6, ["prompt_lookup"] * 6, [None] * 6):
        turns = chat(model, tokenizer, methods, options.max_new_tokens)
        for turn in turns:
            plain = model.generate(turn["prompt"], max_new_tokens=options.max_new_tokens, do_sample=False)
            turn["equal_to_plain"] = plain[0].tolist() == turn.pop("ids")
            turn["prompt_tokens"] = turn.pop("prompt").shape[1]
            print(turn["method"], "equal" if turn["equal_to_plain"] else "DIFFERENT", f"{turn['seconds']:.2f} s",
                  f"{len(turn['arrivals'])} pieces, first at {turn['arrivals'][0]} s", flush=True)  # fmt: skip
        print(f"-- {sum(turn['seconds'] for turn in turns):.1f} s in all", flush=True)
        record["chats"].append(turns)
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
