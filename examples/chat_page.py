"""A chat page that shows speculation at work: tokens of one forward share a colour, and the speed is live.

    pip install 'gradio>=6'
    python examples/chat_page.py

Opens at http://127.0.0.1:7860. The text appears as it is decoded. Tokens that one forward of the model emitted
together have a common background; single tokens have none. Below each answer are its tokens/s, from the question to
the latest token, and its tokens per forward. Untick "Speculative decoding" and ask again: the answer is the same
(in half precision up to near-ties), one token per forward.

Expected output in the terminal, and below the answer to the question that the page starts with:

    * Running on local URL:  http://127.0.0.1:7860

    ... tokens/s, ... tokens per forward, 228 tokens
"""

import argparse
import html
import re
import socket
import time
from queue import Queue
from threading import Thread

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, model_and_head
from hf_specdec.viz import ColoredText, StepStreamer

try:
    import gradio as gr
except ImportError as error:  # `main` reports it, so that --help works without gradio
    gr, NO_GRADIO = None, error

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUESTION = "Write a Python function that returns the mean of a list of numbers, and explain it line by line."
CSS = ".speed { margin-top: 0.6em; font-size: 0.85em; opacity: 0.75; font-variant-numeric: tabular-nums; }"


class StepQueue(StepStreamer):
    """A queue with the text of each decoding step as it is decoded; None at the end, or an error."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.steps, self.stopped = Queue(), False

    def put(self, value):
        """Take the prompt, which comes first, or one token."""
        if self.stopped:
            raise InterruptedError("The reader has stopped.")
        super().put(value)

    def add(self, piece):
        """Send the text of a step."""
        self.steps.put(piece)

    def end(self):
        super().end()
        self.steps.put(None)


def stream_steps(model, tokenizer, messages, **options):
    """Yield the steps of an answer (`Piece`s); generation runs in a thread, and ends when the reader stops."""
    streamer = StepQueue(tokenizer)
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)

    def generate():
        try:
            model.generate(**inputs, streamer=streamer, **options)
        except InterruptedError:
            pass
        except Exception as error:
            streamer.steps.put(error)

    Thread(target=generate, daemon=True).start()
    try:
        while (step := streamer.steps.get()) is not None:
            if isinstance(step, Exception):
                raise gr.Error(str(step)) from step
            yield step
    finally:
        streamer.stopped = True


def shown(steps, seconds):
    """Return the HTML of an answer so far: coloured text, and a line with its speed."""
    num_tokens, num_forwards = sum(step.num_tokens for step in steps), len(steps) - 1  # the first is the prompt's
    tau = f"{(num_tokens - 1) / num_forwards:.2f}" if num_forwards else "-"
    speed = f"{num_tokens / seconds:.1f} tokens/s, {tau} tokens per forward, {num_tokens} tokens"
    # line breaks as entities: Markdown would end the HTML at an empty line
    text = ColoredText(tuple(steps))._repr_html_().replace("\n", "&#10;")
    return f'<div class="answer">{text}</div><div class="speed">{speed}</div>'


def plain_text(content):
    """Return the text of a message of the page's history, without the HTML of `shown`."""
    text = "".join(part["text"] for part in content) if isinstance(content, list) else content
    answer = re.fullmatch(r'<div class="answer">(.*)</div><div class="speed">.*', text, re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", answer[1])) if answer else text


def make_page(model, tokenizer, method, max_new_tokens):
    def answer(message, history, speculative):
        messages = [{"role": turn["role"], "content": plain_text(turn["content"])} for turn in history]
        messages.append({"role": "user", "content": message})
        begin, steps = time.perf_counter(), []
        for step in stream_steps(
            model, tokenizer, messages, speculative=method if speculative else None, do_sample=False,
            max_new_tokens=max_new_tokens,
        ):  # fmt: skip
            steps.append(step)
            yield shown(steps, time.perf_counter() - begin)

    with gr.Blocks(title="hf-specdec", fill_height=True) as page:
        gr.Markdown("## Chat with speculative decoding\nTokens that came in one forward share a background colour; "
                    "tokens without a colour came alone.")  # fmt: skip
        speculative = gr.Checkbox(value=True, label="Speculative decoding", container=False)
        chatbot = gr.Chatbot(
            show_label=False, scale=1, latex_delimiters=[], buttons=[],
            sanitize_html=False,  # `shown` escapes the text; the sanitizer would remove its colours
        )  # fmt: skip
        textbox = gr.Textbox(QUESTION, placeholder="Ask something", show_label=False, submit_btn=True, stop_btn=True)
        gr.ChatInterface(answer, chatbot=chatbot, textbox=textbox, additional_inputs=[speculative], fill_height=True)
    return page


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--method", default="auto", help="value of `speculative=`; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of each answer; default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights; default: the checkpoint's")
    parser.add_argument("--port", type=int, default=7860, help="of the page; default: %(default)s")
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    if gr is None:
        raise SystemExit(f"This example needs gradio: pip install 'gradio>=6' ({NO_GRADIO})")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", options.port))
        except (OSError, OverflowError) as error:
            parser.error(f"--port: {options.port} cannot be used ({error}). Choose another.")
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
        model.warmup(options.method)  # so that the first answer is as fast as the others
    except (OSError, SpeculativeDecodingError) as error:
        parser.error(str(error))
    page = make_page(model, tokenizer, options.method, options.max_new_tokens)
    page.launch(server_port=options.port, css=CSS)


if __name__ == "__main__":
    main()
