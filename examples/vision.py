"""Ask a vision-language model about an image, with speculation.

    pip install pillow
    python examples/vision.py picture.jpg "What is on the table?"
    python examples/vision.py picture.jpg --model org/model --drafter org/head

The processor turns the image into `pixel_values` and puts the image's tokens into the prompt. Both belong to the
prompt, whose forward is transformers' own, so `generate(speculative="auto")` needs no other arguments. Without a head
it drafts by lookup, which pays for answers that repeat themselves or the question: lists, tables, transcribed text. A
draft head must be trained for the language model inside this model. docs/models.md lists the classes that work.

The default model is SmolVLM-256M-Instruct from the Hub (Idefics3, Apache-2.0, 0.5 GB). This script was run only on
tiny LLaVA and Idefics3 models with random weights: they show that the tokens are equal, but give no meaningful text or
speed.

Output (values vary), each answer with its speed and tau, the tokens per forward:

    ...
    plain: ... tokens, ... s, ... tokens/s, tau 1.00
    ...
    auto: ... tokens, ... s, ... tokens/s, tau ...
    the same ids: True
"""

import argparse

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.viz import LiveStreamer

MODEL = "HuggingFaceTB/SmolVLM-256M-Instruct"
QUESTION = "List everything that you see in this image."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", help="path of a picture")
    parser.add_argument("question", nargs="?", default=QUESTION, help="default: a list of what is seen")
    parser.add_argument("--model", default=MODEL, help="a vision-language model; default: %(default)s")
    parser.add_argument("--drafter", help="path or Hub id of a draft head")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer; default: %(default)s")
    options = parser.parse_args()

    processor = AutoProcessor.from_pretrained(options.model)
    # only float32 gives identical answers
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype="float32", device_map="auto")
    model = SpeculativeGenerationMixin.attach(model)
    if options.drafter:
        model.load_drafter(options.drafter)
    content = [{"type": "image"}, {"type": "text", "text": options.question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    image = Image.open(options.image).convert("RGB")
    inputs = processor(images=image, text=prompt, return_tensors="pt").to(model.device)
    model.warmup()  # one-time work, so that it is not timed
    answers = [
        model.generate(
            **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=speculative,
            streamer=LiveStreamer(processor.tokenizer, speculative or "plain"),
        )
        for speculative in (None, "auto")
    ]  # fmt: skip
    print("the same ids:", torch.equal(*answers))


if __name__ == "__main__":
    main()
