"""Answer every line of a JSON-lines file, in batches, and continue an interrupted run.

    python examples/answer_file.py prompts.jsonl answers.jsonl
    python examples/answer_file.py prompts.jsonl answers.jsonl --model org/model --drafter org/head --batch-size 4

Input rows have `prompt`; output rows add `answer` and `batch_tau`: rows of a batch accept at their own pace, and this
is their mean, in tokens per forward and row. To continue, run the same command again: the prompts that were answered
must still be the first ones of the file.

Expected output for a file of two prompts, and a row of `answers.jsonl` (tau depends on the machine):

    0 of 2 were answered before
    2 of 2, tau ...

    {"prompt": "Write a Python function ...", "answer": "```python\\ndef calculate_mean(numbers): ...",
     "batch_tau": ...}
"""

import argparse
import json
import os
from pathlib import Path

from transformers import AutoTokenizer

from hf_specdec import AutoSpeculativeModelForCausalLM, model_and_head


def read_rows(path):
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help='JSON lines such as {"prompt": "..."}')
    parser.add_argument("answers", type=Path, help="file to write, or to continue")
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--batch-size", type=int, default=4, help="prompts per call; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of each answer; default: %(default)s")
    options = parser.parse_args()

    options.answers.touch()
    os.truncate(options.answers, options.answers.read_bytes().rfind(b"\n") + 1)  # an interruption may cut a line
    rows, answered = read_rows(options.prompts), read_rows(options.answers)
    done = len(answered)
    if [row["prompt"] for row in answered] != [row["prompt"] for row in rows[:done]]:
        parser.error(f"{options.answers} answers other prompts: give another file for the answers")
    print(f"{done} of {len(rows)} were answered before", flush=True)

    name, head = model_and_head(options.model, options.drafter)
    model = AutoSpeculativeModelForCausalLM.from_pretrained(name, drafter=head, dtype="auto", device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # Llama's tokenizers have none
    with options.answers.open("a", encoding="utf-8") as output:
        for start in range(done, len(rows), options.batch_size):
            batch = rows[start : start + options.batch_size]
            inputs = tokenizer.apply_chat_template(
                [[{"role": "user", "content": row["prompt"]}] for row in batch],
                add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
            ).to(model.device)  # fmt: skip
            ids = model.generate(
                **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative="auto",
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
            texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            tau = round(model.last_speculation.tau, 2)
            for row, text in zip(batch, texts, strict=True):
                output.write(json.dumps({**row, "answer": text.strip(), "batch_tau": tau}, ensure_ascii=False) + "\n")
            output.flush()
            print(f"{start + len(batch)} of {len(rows)}, tau {tau}", flush=True)


if __name__ == "__main__":
    main()
