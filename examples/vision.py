"""Ask a vision-language model about an image, with speculation.

    python examples/vision.py picture.jpg "What is on the table?"
    python examples/vision.py picture.jpg --model org/model --drafter org/head

The processor turns the image into `pixel_values` and puts the image's tokens into the prompt. Both belong to the
prompt, whose forward is transformers' own, so `generate(speculative="auto")` needs no other arguments. Without a head
it drafts by lookup, which pays for answers that repeat themselves or the question: lists, tables, transcribed text. A
draft head must be trained for the language model inside this model. docs/models.md lists the classes that work.

The default model is SmolVLM-256M-Instruct from the Hub (Idefics3, Apache-2.0, 0.5 GB). This script was run only on
tiny LLaVA and Idefics3 models with random weights: they show that the tokens are equal, but give no meaningful text or
speed.

Output (values vary):

    ... (the answer)
    plain: ... tokens/s
    auto: ... tokens/s, tau ...
    the same ids: True
"""

import argparse
import time

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, model_and_head

DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL = "HuggingFaceTB/SmolVLM-256M-Instruct"
QUESTION = "List everything that you see in this image."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", help="path of a picture")
    parser.add_argument("question", nargs="?", default=QUESTION, help="default: a list of what is seen")
    parser.add_argument(
        "--model", default=MODEL, help="path or Hub id of a vision-language model; default: %(default)s"
    )
    parser.add_argument("--drafter", help="path or Hub id of a draft head")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer; default: %(default)s")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="only float32 gives identical answers; default: %(default)s"
    )
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    try:
        from PIL import Image
    except ImportError as error:
        raise SystemExit(f"This example needs pillow: pip install pillow ({error})") from error
    try:
        with Image.open(options.image) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        parser.error(f"the image cannot be read: {error}")
    try:
        name, head = model_and_head(options.model, options.drafter)
        processor = AutoProcessor.from_pretrained(name)
        if processor.chat_template is None:
            parser.error(f"The model {name!r} has no chat template. Give an instruct model: --model.")
        model = AutoModelForImageTextToText.from_pretrained(name, dtype=options.dtype)
        if torch.accelerator.is_available():
            model = model.to(torch.accelerator.current_accelerator())
        model = SpeculativeGenerationMixin.attach(model)
        if head:
            model.load_drafter(head)
    except (OSError, SpeculativeDecodingError) as error:
        parser.error(str(error))
    content = [{"type": "image"}, {"type": "text", "text": options.question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(images=image, text=prompt, return_tensors="pt")
    inputs = inputs.to(model.device, model.dtype)  # the pixels get the model's dtype, the ids keep theirs
    model.warmup()  # one-time work, so that it is not timed below
    answers, lines = [], []
    for speculative in (None, "auto"):
        begin = time.perf_counter()
        ids = model.generate(
            **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=speculative
        )[0, inputs["input_ids"].shape[1] :]
        speed = len(ids) / (time.perf_counter() - begin)
        tau = f", tau {model.last_speculation.mean_accepted_length:.2f}" if speculative else ""
        lines.append(f"{speculative or 'plain'}: {speed:.1f} tokens/s{tau}")
        answers.append(ids)
    print(processor.decode(answers[1], skip_special_tokens=True).strip(), *lines, sep="\n")
    print("the same ids:", torch.equal(*answers))


if __name__ == "__main__":
    main()
