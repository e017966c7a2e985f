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
from queue import Queue
from threading import Thread

from transformers import AutoTokenizer

from hf_specdec import AutoSpeculativeModelForCausalLM, model_and_head
from hf_specdec.viz import ColoredText, StepStreamer

QUESTION = "Write a Python function that returns the mean of a list of numbers, and explain it line by line."


class StepQueue(StepStreamer):
    """A streamer with a queue, which gets each step of an answer as it is decoded."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.queue, self.stopped, self.error = Queue(), False, None

    def add(self, piece):
        """Take the text of a step."""
        if self.stopped:
            raise InterruptedError("The reader has stopped.")
        self.queue.put(piece)


def stream_html(model, tokenizer, messages, **options):
    """Yield the HTML of an answer after each step; generation runs in a thread, and ends when the reader stops."""
    steps = StepQueue(tokenizer)
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)

    def generate():
        try:
            model.generate(**inputs, streamer=steps, **options)
        except InterruptedError:
            pass
        except Exception as error:
            steps.error = error
        finally:
            steps.queue.put(None)

    Thread(target=generate, daemon=True).start()
    try:
        while steps.queue.get() is not None:
            # line breaks as entities: Markdown would end the HTML at an empty line
            text = ColoredText(tuple(steps.pieces))._repr_html_().replace("\n", "&#10;")
            speed = f"{steps.tokens_per_second:.1f} tokens/s, {steps.tau:.2f} tokens per forward"
            yield f"<div>{text}</div><small>{speed}, {steps.num_tokens} tokens</small>"
        if steps.error:
            raise steps.error
    finally:
        steps.stopped = True


def plain_text(turn):
    """Return the text of a message of the page's history; that of an answer without the HTML of `stream_html`."""
    content = turn["content"]  # parts; a text in calls of gradio's clients
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return text if turn["role"] == "user" else html.unescape(re.sub(r"<small>.*|<[^>]*>", "", text))


def main():
    import gradio as gr

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    options = parser.parse_args()

    name, head = model_and_head(options.model, options.drafter)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoSpeculativeModelForCausalLM.from_pretrained(name, drafter=head, dtype="auto", device_map="auto")
    model.warmup()  # so that the first answer is as fast as the others

    def answer(message, history, speculative):
        messages = [{"role": turn["role"], "content": plain_text(turn)} for turn in history]
        messages.append({"role": "user", "content": message})
        method = "auto" if speculative else None
        yield from stream_html(model, tokenizer, messages, speculative=method, do_sample=False, max_new_tokens=256)

    with gr.Blocks(title="hf-specdec", fill_height=True) as page:
        speculative = gr.Checkbox(value=True, label="Speculative decoding")
        # the text is escaped already, and the sanitizer would remove its colours
        chatbot = gr.Chatbot(show_label=False, scale=1, latex_delimiters=[], sanitize_html=False)
        textbox = gr.Textbox(QUESTION, show_label=False, submit_btn=True, stop_btn=True)
        gr.ChatInterface(answer, chatbot=chatbot, textbox=textbox, additional_inputs=[speculative], fill_height=True)
    page.launch()


if __name__ == "__main__":
    main()
