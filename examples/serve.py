"""Serve a model with an OpenAI-compatible API: `transformers serve`, with speculation.

    pip install 'transformers[serving]'
    python examples/serve.py
    python examples/serve.py --model org/model --drafter org/head --port 8000
    python examples/serve.py --model path/to/model.gguf    # stays packed, on the CPU, with rounded activations

    from openai import OpenAI
    client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Name three rivers."}]
    print(client.chat.completions.create(model=model, messages=messages).choices[0].message.content)

Requests must name the model that is served: what --model was given, or a path without it. The server prints it:

    model: ".../.cache/hf-specdec/smollm2-135m-instruct-0.1.2"
    INFO:     Uvicorn running on http://localhost:8000 (Press CTRL+C to quit)

The model is attached in place, and `generation_config.speculative` is the default of every call, so the server needs
no other change, also for streaming. It answers one request at a time; engines answer many.

transformers' server sets no limit on the length, and answers most bad requests with status 500 and no reason. Here
answers end after --max-new-tokens, so that a request for 10**9 tokens does not block all others. Errors are returned
with their reason, those of a stream as its last event. A request can choose the method,
`generation_config='{"speculative": "prompt_lookup"}'`, but none of the options that read files or take much memory.
"""

import argparse
import time
from pathlib import Path

from fastapi.responses import JSONResponse
from torch import OutOfMemoryError
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager

from hf_specdec import (
    CacheCapacityError,
    SpeculativeDecodingError,
    SpeculativeGenerationMixin,
    UnsupportedModelError,
    load_gguf,
    model_and_head,
)

NO_MEMORY = (CacheCapacityError, MemoryError, OutOfMemoryError)


class SpeculativeServer(Serve):
    """transformers' server with an attached model."""

    def __init__(self, name, head, port, max_new_tokens):
        self.name, self.head, self.max_new_tokens = name, head, max_new_tokens
        super().__init__(force_model=name, port=port, non_blocking=True)

    def start_server(self):
        """Attach the model and serve; `Serve` calls this after loading it."""
        (loaded,) = self._model_manager.loaded_models.values()
        model = SpeculativeGenerationMixin.attach(loaded.model)
        if self.head:
            model.load_drafter(self.head)
        model.warmup()  # so that the first request is not slower
        model.generation_config.speculative = "auto"

        served = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": ""}
        self._model_manager.get_gen_models = lambda: [served]  # transformers lists the models of the Hub's cache
        for handler in (self._chat_handler, self._completion_handler, self._response_handler):
            handler._build_generation_config = self.limited(handler._build_generation_config)
        # the last three: what transformers and chat templates raise for malformed messages
        for kind in (*NO_MEMORY, SpeculativeDecodingError, ValueError, TypeError, LookupError, AttributeError,
                     ArithmeticError):  # fmt: skip
            self.server.config.app.add_exception_handler(kind, answer_with_reason)
        self.server.run()

    def limited(self, build):
        """Limit what requests may ask for; `build` makes the generation config of a request."""

        def build_limited(*args, **kwargs):
            config = build(*args, **kwargs)
            asked = self.max_new_tokens if config.max_new_tokens is None else config.max_new_tokens
            config.max_new_tokens = min(asked, self.max_new_tokens)
            if config.num_return_sequences not in (None, 1):
                raise ValueError(f"num_return_sequences={config.num_return_sequences}: there is one answer.")
            if not isinstance(getattr(config, "speculative", None), str | None):
                raise ValueError("speculative must be the name of a method, or null.")
            return config

        return build_limited


def packed_loader(load):
    """Return `ModelManager._load_model`, but with the weights of a GGUF file left packed."""

    def load_packed(self, name, *args, gguf_file=None, **kwargs):
        if gguf_file is None:
            return load(self, name, *args, **kwargs)
        return load_gguf(Path(name.split("@")[0], gguf_file), dtype="bfloat16", round_activations=True)

    return load_packed


async def answer_with_reason(_, error):
    """Answer a request that failed in the format of OpenAI's errors, whose message their clients show."""
    status = 503 if isinstance(error, NO_MEMORY) else 500 if isinstance(error, UnsupportedModelError) else 400
    kind = "invalid_request_error" if status == 400 else "server_error"
    return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}", "type": kind}}, status)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--port", type=int, default=8000, help="of the server; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="most of an answer; default: %(default)s")
    options = parser.parse_args()

    name, head = model_and_head(options.model, options.drafter)
    if name.endswith(".gguf"):
        name = ":".join((str(Path(name).parent), Path(name).name))  # as transformers' server names a file
        ModelManager._load_model = packed_loader(ModelManager._load_model)
    print(f'model: "{name}"', flush=True)
    SpeculativeServer(name, head, options.port, options.max_new_tokens)


if __name__ == "__main__":
    main()
