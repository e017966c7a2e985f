"""An OpenAI-compatible server: transformers' own `transformers serve`, whose model speculates.

    pip install 'transformers[serving]'
    python examples/serve.py org/model --drafter org/head --port 8000

    from openai import OpenAI
    client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    client.chat.completions.create(model="org/model", messages=[{"role": "user", "content": "Why is the sky blue?"}])

Attaching works in place, and `generation_config.speculative` is the default of every call, so a server that knows
nothing of speculation uses it, streaming included. It answers one request at a time; engines answer many.

transformers' server generates in one thread, without a limit on the length, and goes on after the client has left: one
request for 10**9 tokens, and all that follow wait for ever. Here a request ends when its client leaves, its length is
limited by the model's context, and an error, even one in a stream before its first token, is a status and a message.
"""

import argparse
import asyncio
import json
from contextvars import ContextVar

from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, _GenerationCancelled, _StreamError

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin

MISTAKES = (
    SpeculativeDecodingError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    TemplateError,
)
"""What a malformed request raises in transformers or here: status 400. Everything else is the server's fault: 500."""

DEFAULT_LENGTH = 1024
"""New tokens if a request does not say how many: transformers' default. Cut to what the context has room for."""

MAX_MESSAGE = 1000
"""Characters of an error's message: it may repeat what came."""

UNKNOWN_CONTEXT = 8192
"""Tokens of a model whose configuration does not name its longest text."""

OPERATORS = {"adaptive", "compile", "max_cache_length", "trace"}
"""Fields of `speculative` that read files of this machine, or take its time or memory: not for requests."""

REQUEST = ContextVar("REQUEST")
"""The `Request` that the running task answers."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter")
    parser.add_argument("--method", default="auto", help="what to pass as `speculative=`")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    server, _ = start(options.model, options.drafter, options.method, options.port)
    try:
        server._thread.join()
    except KeyboardInterrupt:
        server.kill_server()


def start(name, drafter, method, port):
    """A server in a thread of its own, its model loaded and attached."""
    server = SpeculativeServer(name, drafter, method, port)
    return server, server.model


class SpeculativeServer(Serve):
    """transformers' server with a speculative model, and errors that end one request."""

    def __init__(self, name, drafter, method, port):
        self.drafter, self.method = drafter, method
        super().__init__(force_model=name, port=port, non_blocking=True)

    def start_server(self):
        """Called by `Serve` when the model is loaded and no request has been read yet."""
        ((model_id, loaded),) = self._model_manager.loaded_models.items()
        self.model = SpeculativeGenerationMixin.attach(loaded.model)
        if self.drafter:
            self.model.load_drafter(self.drafter)
        self.model.generation_config.speculative = self.method
        self._generation_state._generate_managers[model_id] = Generations()
        for handler in (self._chat_handler, self._completion_handler, self._response_handler):
            handler.handle_request = when_started(handler.handle_request)
        app = self.server.config.app
        for kind in MISTAKES:
            app.add_exception_handler(kind, answer_with(400))
        app.add_exception_handler(Exception, answer_with(500))
        self.server.config.app = EndsWithItsClient(app)
        super().start_server()


def answer_with(status):
    async def answer(_, error):
        message = str(error) if isinstance(error, SpeculativeDecodingError) else f"{type(error).__name__}: {error}"
        kind = "invalid_request_error" if status == 400 else "server_error"
        return JSONResponse({"error": {"message": message[:MAX_MESSAGE], "type": kind, "code": status}}, status)

    return answer


class Request:
    """A request while it is answered.

    Attributes:
        gone: Nobody waits for the answer any more.
        started: Done with the first token of a stream, or with the error before it.
    """

    def __init__(self):
        self.gone = False
        self.started = asyncio.get_running_loop().create_future()


class EndsWithItsClient:
    """ASGI middleware that cancels a request when its connection is closed."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request, messages = Request(), asyncio.Queue()
        REQUEST.set(request)

        async def read():
            kind = ""
            while kind != "http.disconnect":
                message = await receive()
                messages.put_nowait(message)
                kind = message["type"]

        answering = asyncio.ensure_future(self.app(scope, messages.get, send))
        reading = asyncio.ensure_future(read())
        await asyncio.wait({answering, reading}, return_when=asyncio.FIRST_COMPLETED)
        request.gone = True
        for task in (answering, reading):
            task.cancel()
        await asyncio.wait({answering})
        return None if answering.cancelled() else answering.result()


def when_started(handle_request):
    """Hold a stream back until its first token: an error before that is still a status, not a part of the stream."""

    async def handle(body, request_id):
        response = await handle_request(body, request_id)
        if body.get("stream"):
            await REQUEST.get().started
        return response

    return handle


def check_request(model, inputs, config):
    """Limit a request's length, and refuse what would take the server's time or memory without limit.

    Raises:
        ValueError: With the limit and what was asked for.
    """
    if config.num_return_sequences not in (None, 1):
        raise ValueError(f"num_return_sequences={config.num_return_sequences}: a request has one answer here.")
    speculative = getattr(config, "speculative", None)
    refused = OPERATORS.intersection(speculative) if isinstance(speculative, dict) else ()
    if refused:
        raise ValueError(f"Requests cannot set {', '.join(sorted(refused))} of speculative; the server's owner can.")
    prompt = inputs["input_ids"].shape[-1]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or UNKNOWN_CONTEXT
    asked = config.max_new_tokens
    if asked is None:
        asked = DEFAULT_LENGTH if config.max_length is None else config.max_length - prompt
    if prompt >= context or asked > max(DEFAULT_LENGTH, context - prompt):
        raise ValueError(
            f"{prompt} tokens of prompt and {asked} new ones do not fit the model's context of {context}."
        )
    config.max_new_tokens = min(asked, context - prompt)


class Generations(GenerateManager):
    """Runs one generation after another, as its base class, within limits."""

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        """As in transformers, with errors before the first token in `started`."""
        check_request(model, inputs, gen_config)
        loop, queue, request = asyncio.get_running_loop(), asyncio.Queue(), REQUEST.get()
        tokenizer = getattr(processor, "tokenizer", processor)._tokenizer
        streamer = Streamer(request, tokenizer, loop, queue, response_parser=response_parser)

        def fail(error):
            if request.started.done():
                queue.put_nowait(_StreamError(json.dumps(str(error))[1:-1]))  # transformers puts it between quotes
            else:
                request.started.set_exception(error)

        def run():
            try:
                model.generate(**inputs, streamer=streamer, generation_config=gen_config, tokenizer=processor)
            except _GenerationCancelled:
                loop.call_soon_threadsafe(queue.put_nowait, None)
            except Exception as error:
                loop.call_soon_threadsafe(fail, error)

        self.submit(run)
        return queue, streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        """As in transformers, until the client leaves."""
        check_request(model, inputs, gen_config)
        inputs = {**inputs, "streamer": Stop(REQUEST.get())}
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def async_submit(self, fn, *args, **kwargs):
        """Shielded: the thread sets the result of a request that was cancelled, too."""
        return asyncio.shield(super().async_submit(fn, *args, **kwargs))


class Stop:
    """A streamer that keeps nothing, and ends a generation that nobody waits for."""

    def __init__(self, request):
        self.request = request

    def put(self, _):
        if self.request.gone:
            raise _GenerationCancelled

    def end(self):
        pass


class Streamer(DirectStreamer):
    """transformers' own, which reports the first token."""

    def __init__(self, request, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.request = request

    def put(self, value):
        if self.request.gone:
            raise _GenerationCancelled
        super().put(value)
        if self.total_tokens:
            self._loop.call_soon_threadsafe(self._start)

    def end(self):
        super().end()
        self._loop.call_soon_threadsafe(self._start)

    def _start(self):
        if not self.request.started.done():
            self.request.started.set_result(None)


if __name__ == "__main__":
    main()
