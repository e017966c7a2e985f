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

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, model_and_head

DTYPES = ("auto", "float32", "bfloat16", "float16")


def read_rows(path):
    """Return the rows of a JSON-lines file, each of which has a prompt.

    Raises:
        OSError, ValueError: The file cannot be read, or a line is not JSON or has no prompt.
    """
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ValueError(f'{path}, line {number} is not a row such as {{"prompt": "..."}}')
            rows.append(row)
    return rows


def read_answers(path):
    """Return the rows of a file of answers; a last line that an interruption left incomplete is cut off.

    Raises:
        OSError, ValueError: See `read_rows`.
    """
    content = path.read_bytes() if path.exists() else b""
    length = content.rfind(b"\n") + 1
    if length < len(content):
        os.truncate(path, length)
    return read_rows(path) if length else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help='JSON lines such as {"prompt": "..."}')
    parser.add_argument("answers", type=Path, help="file to write, or to continue")
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--batch-size", type=int, default=4, help="prompts per call; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of each answer; default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights; default: the checkpoint's")
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    if options.batch_size < 1:
        parser.error(f"--batch-size must be at least 1, got {options.batch_size}")
    if not options.answers.parent.is_dir():
        parser.error(f"the directory {options.answers.parent} does not exist")
    try:
        rows, answered = read_rows(options.prompts), read_answers(options.answers)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    done = len(answered)
    if done > len(rows):
        parser.error(f"{options.answers} has {done} answers, but there are {len(rows)} prompts: give another file")
    for number, (before, row) in enumerate(zip(answered, rows, strict=False), start=1):
        if before["prompt"] != row["prompt"]:
            parser.error(
                f"answer {number} of {options.answers} is to another prompt: give another file for the answers"
            )
    print(f"{done} of {len(rows)} were answered before", flush=True)
    if done == len(rows):
        return
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
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:  # Llama's tokenizers have none
        tokenizer.pad_token = tokenizer.eos_token
    with options.answers.open("a", encoding="utf-8") as output:
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
                output.write(json.dumps({**row, "answer": text.strip(), "batch_tau": tau}, ensure_ascii=False) + "\n")
            output.flush()
            print(f"{min(start + len(batch), len(rows))} of {len(rows)}, tau {tau}", flush=True)


if __name__ == "__main__":
    main()
