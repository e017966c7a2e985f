"""Answer every line of a JSON-lines file, in batches, and continue an interrupted run.

    python examples/answer_file.py prompts.jsonl answers.jsonl
    python examples/answer_file.py prompts.jsonl answers.jsonl --model org/model --drafter org/head --batch-size 4

Input rows have `prompt`; output rows add `answer` and `tau`. Rows of a batch accept at their own pace; tau is the mean
over the batch, in tokens per forward and row.

Expected output for a file of two prompts, and a row of `answers.jsonl`:

    2 of 2, tau 1.12

    {"prompt": "Write a Python function ...", "answer": "```python\\ndef calculate_mean(numbers): ...", "tau": 1.12}
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.generation.loading import HUB_ID, default_head, packaged_model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    name = options.model or packaged_model() or HUB_ID
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(name, dtype=options.dtype))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    head = options.drafter or default_head(options.model)
    if head:
        model.load_drafter(head)
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    done = len(options.answers.read_text().splitlines()) if options.answers.exists() else 0
    with options.answers.open("a") as output:
        for start in range(done, len(rows), options.batch_size):
            batch = rows[start : start + options.batch_size]
            chats = [[{"role": "user", "content": row["prompt"]}] for row in batch]
            inputs = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            ).to(model.device)
            ids = model.generate(
                **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative="auto",
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
            texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            tau = round(model.last_speculation.mean_accepted_length, 2)
            for row, text in zip(batch, texts, strict=True):
                output.write(json.dumps({**row, "answer": text.strip(), "tau": tau}) + "\n")
            output.flush()
            print(f"{min(start + len(batch), len(rows))} of {len(rows)}, tau {tau}", flush=True)


if __name__ == "__main__":
    main()
