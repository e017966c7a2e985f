"""Ask about a long document: chunked prefill, a window for the head, time to the first token, and memory.

    python examples/long_document.py
    python examples/long_document.py report.txt "Summarize the report." --chunk 512 --draft-window 1024

* `prefill_chunk_size` reads the document in pieces, so that memory for activations does not grow with its length.
* `draft_window` lets the head attend to the first four tokens and the last N only. The answer does not depend on it.
  The default is the length that the head was trained on; a head without one attends to everything.
* Answers about a document repeat parts of it, which `"prompt_lookup"` drafts. `"auto"` combines it with the head.

Prints the answer for plain and speculative decoding, each with the time until the first token, and the highest memory
use: on CUDA what was allocated, elsewhere that of the process (on Linux). To see what chunks save, run it again with
`--chunk 0`.

The packaged model is small: do not expect a good answer about a long text.

Expected output (tau depends on the machine):

    LICENSE: 2011 tokens
    This License does not grant permission to use the trade names, trademarks, service marks, or product names of ...
    plain: ... tokens, ... s, ... tokens/s, tau 1.00
        first token after ... s
    This License does not grant permission to use the trade names, trademarks, service marks, or product names of ...
    auto: ... tokens, ... s, ... tokens/s, tau ...
        first token after ... s
    the same ids: True
    peak memory: ... MiB, of which 513 MiB are the model's weights
"""

import argparse
import resource
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_specdec import AutoSpeculativeModelForCausalLM, model_and_head
from hf_specdec.viz import LiveStreamer

LICENSE = Path(__file__).parents[1] / "LICENSE"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", nargs="?", type=Path, default=LICENSE, help="default: that of this repository")
    parser.add_argument("question", nargs="?", default="Summarize this license.", help="default: %(default)s")
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--chunk", type=int, default=512, help="tokens that prefill reads at a time; 0: all at once")
    parser.add_argument("--draft-window", type=int, help="last tokens that the head attends to; default: see above")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer; default: %(default)s")
    options = parser.parse_args()

    name, head = model_and_head(options.model, options.drafter)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoSpeculativeModelForCausalLM.from_pretrained(name, drafter=head, dtype="float32", device_map="auto")
    message = f"{options.question}\n\n{options.document.read_text(encoding='utf-8')}"
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    length = inputs["input_ids"].shape[1]
    print(f"{options.document.name}: {length} tokens")
    speculative = {"method": "auto", "draft_window": options.draft_window}
    model.warmup(speculative, prompt_length=length)  # one-time work, so that it is not timed
    answers = []
    for label, method in (("plain", None), ("auto", speculative)):
        streamer = LiveStreamer(tokenizer, label)
        answers.append(model.generate(
            **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=method,
            prefill_chunk_size=options.chunk or None, streamer=streamer,
        ))  # fmt: skip
        print(f"    first token after {streamer.pieces[0].seconds:.2f} s")
    print("the same ids:", torch.equal(*answers))
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = model.get_memory_footprint()
    print(f"peak memory: {peak / 2**20:.0f} MiB, of which {weights / 2**20:.0f} MiB are the model's weights")


if __name__ == "__main__":
    main()
