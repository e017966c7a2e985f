"""Ask about a long document: chunked prefill, a window for the head, time to the first token, and memory.

    python examples/long_document.py
    python examples/long_document.py report.txt "Summarize the report." --chunk 512 --draft-window 1024

* `prefill_chunk_size` reads the document in pieces, so that memory for activations does not grow with its length.
* `draft_window` lets the head attend to the first four tokens and the last N only. The answer does not depend on it.
  The default is the length that the head was trained on; a head without one attends to everything.
* Answers about a document repeat parts of it, which `"prompt_lookup"` drafts. `"auto"` combines it with the head.

Prints the answer, and for plain and speculative decoding the time until the first token, the tokens/s after it, and
the highest memory use during the call. To see what chunks save, run it again with `--chunk 0`.

The packaged model is small: do not expect a good answer about a long text.

Expected output (tau depends on the machine; the memory of the second line includes what one-time work left):

    LICENSE: 2011 tokens
    weights: 513 MiB
    plain: first token after ... s, then ... tokens/s, peak memory ... MiB
    auto: first token after ... s, then ... tokens/s, tau ..., peak memory ... MiB
    the same ids: True
    This License does not grant permission to use the trade names, trademarks, service marks, or product names of ...
"""

import argparse
import threading
import time
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, model_and_head

DOCUMENT = Path(__file__).parents[1] / "LICENSE"
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUESTION = "Summarize this license."


class FirstToken(BaseStreamer):
    """Notes the time of the first token; the prompt is put before it."""

    def __init__(self):
        self.num_puts, self.time = 0, None

    def put(self, _):
        self.num_puts += 1
        if self.num_puts == 2:
            self.time = time.perf_counter()

    def end(self):
        pass


class PeakMemory:
    """Context manager that measures the highest memory use during its block, weights included, in MiB.

    On CUDA it is what the allocator has given out, elsewhere the process's resident memory, read every 5 ms.
    """

    def __enter__(self):
        self._peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_):
        if torch.cuda.is_available():
            self._peak = torch.cuda.max_memory_allocated()
        else:
            self._done.set()
            self._thread.join()
        self.mebibytes = self._peak / 2**20

    def _watch(self):
        process, ended = psutil.Process(), False
        while not ended:
            ended = self._done.wait(0.005)
            self._peak = max(self._peak, process.memory_info().rss)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "document", nargs="?", type=Path, default=DOCUMENT, help="text file; default: LICENSE of this repository"
    )
    parser.add_argument("question", nargs="?", default=QUESTION, help="default: a summary")
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--method", default="auto", help='method of `speculative=`, such as "prompt_lookup"')
    parser.add_argument("--chunk", type=int, default=512, help="tokens that prefill reads at a time; 0: all at once")
    parser.add_argument("--draft-window", type=int, help="last tokens that the head attends to; default: see above")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer; default: %(default)s")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="only float32 gives identical answers; default: %(default)s"
    )
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    if options.chunk < 0:
        parser.error(f"--chunk must be 0 or the tokens of a piece, got {options.chunk}")
    try:
        document = options.document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"the document cannot be read: {error}")
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

    message = f"{options.question}\n\n{document}"
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    length = inputs["input_ids"].shape[1]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and length + options.max_new_tokens > context:
        parser.error(f"{length} prompt tokens and {options.max_new_tokens} new ones exceed the model's context of "
                     f"{context}. Give a shorter text or another model.")  # fmt: skip
    print(f"{options.document.name}: {length} tokens")
    speculative = {"method": options.method}
    if options.draft_window is not None:
        speculative["draft_window"] = options.draft_window
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**20
    print(f"weights: {weights:.0f} MiB")
    try:
        model.warmup(speculative, prompt_length=length)  # one-time work, so that it is not timed
    except SpeculativeDecodingError as error:
        parser.error(str(error))
    answers = []
    for method in (None, speculative):
        first, begin = FirstToken(), time.perf_counter()
        with PeakMemory() as memory:
            ids = model.generate(
                **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=method,
                prefill_chunk_size=options.chunk or None, streamer=first,
            )[0, length:]  # fmt: skip
        speed = (len(ids) - 1) / (time.perf_counter() - first.time)
        tau = f", tau {model.last_speculation.mean_accepted_length:.2f}" if method else ""
        print(f"{options.method if method else 'plain'}: first token after {first.time - begin:.2f} s, "
              f"then {speed:.1f} tokens/s{tau}, peak memory {memory.mebibytes:.0f} MiB")  # fmt: skip
        answers.append(ids)
    print("the same ids:", torch.equal(*answers))
    print(tokenizer.decode(answers[1], skip_special_tokens=True))


if __name__ == "__main__":
    main()
