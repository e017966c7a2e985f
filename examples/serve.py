"""Serve a model with an OpenAI-compatible API: `transformers serve`, with speculation.

    pip install 'transformers[serving]'
    python examples/serve.py
    python examples/serve.py --model org/model --drafter org/head --port 8000

    from openai import OpenAI
    client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Name three rivers."}]
    print(client.chat.completions.create(model=model, messages=messages).choices[0].message.content)

Requests must name the model that is served; another name gives status 404 and a reason. The name is what --model was
given, or a path without it; the server prints it:

    model: ".../.cache/hf-specdec/smollm2-135m-instruct-0.1.2"
    INFO:     Uvicorn running on http://localhost:8000 (Press CTRL+C to quit)

The model is attached in place, and `generation_config.speculative` is the default of every call, so the server needs
no other change, also for streaming. It answers one request at a time; engines answer many.

transformers' server generates in one thread, without a limit on the length, and continues after a client disconnects,
so one request for 10**9 tokens blocks all others. Here a request is cancelled when its client disconnects, its length
is limited by the model's context, and errors are returned as a status and a message, also for streams before their
first token. All that speculation needs are the lines of `SpeculativeServer.start_server` down to `generation_config`;
the rest is limits and errors.
"""

import argparse
import asyncio
import json
import socket
import time
from contextvars import ContextVar

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, model_and_head

try:
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError
    from starlette.exceptions import HTTPException
    from transformers.cli.serve import Serve
    from transformers.cli.serving.utils import DirectStreamer, GenerateManager, _GenerationCancelled, _StreamError
except ImportError as error:
    package = "transformers[serving]"
    raise SystemExit(f"This example needs {package}: pip install '{package}' ({error})") from error

MISTAKES = (
    SpeculativeDecodingError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    TemplateError,
)
"""Exceptions that malformed requests cause, here or in transformers (status 400); all others give status 500."""

DEFAULT_LENGTH = 1024
"""Default number of new tokens, as in transformers; reduced to fit the context."""

MAX_MESSAGE = 1000
"""Maximum characters of an error message, which may quote the request."""

UNKNOWN_CONTEXT = 8192
"""Context length in tokens if the model's configuration does not state one."""

OPERATORS = {"adaptive", "compile", "max_cache_length", "trace"}
"""Fields of `speculative` that requests may not set: they read local files, or take much time or memory."""

REQUEST = ContextVar("REQUEST")
"""The `Request` of the current task."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--method", default="auto", help="value of `speculative=`; default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="of the server; default: %(default)s")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", options.port))
        except (OSError, OverflowError) as error:
            parser.error(f"--port: {options.port} cannot be used ({error}). Choose another.")
    try:
        name, head = model_and_head(options.model, options.drafter)
        print(f'model: "{name}"', flush=True)
        server, _ = start(name, head, options.method, options.port)
    except (OSError, SpeculativeDecodingError) as error:
        parser.error(str(error))
    try:
        server._thread.join()
    except KeyboardInterrupt:
        server.kill_server()


def start(name, drafter, method, port):
    """Start a server in a separate thread; return it and its attached model."""
    server = SpeculativeServer(name, drafter, method, port)
    return server, server.model


class SpeculativeServer(Serve):
    """transformers' server with an attached model; an error ends only its own request."""

    def __init__(self, name, drafter, method, port):
        self.name, self.drafter, self.method = name, drafter, method
        super().__init__(force_model=name, port=port, non_blocking=True)

    def start_server(self):
        """Attach the model before the first request; `Serve` calls this after loading it."""
        ((model_id, loaded),) = self._model_manager.loaded_models.items()
        self.model = SpeculativeGenerationMixin.attach(loaded.model)
        if self.drafter:
            self.model.load_drafter(self.drafter)
        self.model.warmup(self.method)  # refuses a wrong method now, and the first request is not slower
        self.model.generation_config.speculative = self.method
        served = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": ""}
        self._model_manager.get_gen_models = lambda: [served]  # transformers lists the Hub cache, or fails without one
        self._generation_state._generate_managers[model_id] = Generations()
        for handler in (self._chat_handler, self._completion_handler, self._response_handler):
            handler.handle_request = for_model(self.name, when_started(handler.handle_request))
        app = self.server.config.app
        add_handlers(app)
        self.server.config.app = EndsWithItsClient(app)
        super().start_server()


def refusal(message, status, code=None):
    """Return a response in the format of OpenAI's errors, whose message their clients show."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message[:MAX_MESSAGE], "type": kind, "param": None, "code": code or status}
    return JSONResponse({"error": error}, status)


def answer_with(status):
    async def answer(_, error):
        own = isinstance(error, SpeculativeDecodingError)
        return refusal(str(error) if own else f"{type(error).__name__}: {error}", status)

    return answer


async def answer_refusal(_, error):
    """Answer what transformers or FastAPI refuses, such as a field that is not supported, with its reason."""
    return refusal(str(error.detail), error.status_code)


def add_handlers(app):
    """Let an application answer every error with its reason, in the format of OpenAI's errors."""
    for kind in MISTAKES:
        app.add_exception_handler(kind, answer_with(400))
    app.add_exception_handler(Exception, answer_with(500))
    app.add_exception_handler(HTTPException, answer_refusal)
    app.add_exception_handler(RequestValidationError, answer_with(400))  # no JSON
    app.add_exception_handler(NoSuchModelError, answer_no_model)


class NoSuchModelError(Exception):
    """A request names a model that is not served."""


async def answer_no_model(_, error):
    return refusal(str(error), 404, "model_not_found")


def for_model(name, handle_request):
    """Refuse requests that name another model than the one that is served."""

    async def handle(body, request_id):
        if body.get("model") not in (None, name):
            raise NoSuchModelError(f"The model {body['model']!r} is not served here. Use {name!r}, or omit `model`.")
        return await handle_request(body, request_id)

    return handle


class Request:
    """A request that is being answered.

    Attributes:
        gone: Whether the client has disconnected.
        started: Set at the first token of a stream, or to an error raised before it.
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
    """Delay a stream until its first token, so that earlier errors are returned as a status, not inside the stream."""

    async def handle(body, request_id):
        response = await handle_request(body, request_id)
        if body.get("stream"):
            await REQUEST.get().started
        return response

    return handle


def check_request(model, inputs, config):
    """Limit a request's length, and refuse settings that could use unlimited time or memory.

    Raises:
        ValueError: Naming the limit and the requested value.
    """
    if config.num_return_sequences not in (None, 1):
        raise ValueError(f"num_return_sequences={config.num_return_sequences}: only one answer is supported.")
    speculative = getattr(config, "speculative", None)
    refused = OPERATORS.intersection(speculative) if isinstance(speculative, dict) else ()
    if refused:
        raise ValueError(f"Requests cannot set {', '.join(sorted(refused))} of speculative; set them on the server.")
    prompt = inputs["input_ids"].shape[-1]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or UNKNOWN_CONTEXT
    length = config.max_new_tokens
    if length is None:
        length = DEFAULT_LENGTH if config.max_length is None else config.max_length - prompt
    if prompt >= context or length > max(DEFAULT_LENGTH, context - prompt):
        raise ValueError(
            f"{prompt} prompt tokens and {length} new tokens do not fit the model's context of {context}."
        )
    config.max_new_tokens = min(length, context - prompt)


class Generations(GenerateManager):
    """Runs one generation at a time, like its base class, with limits."""

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        """Same as transformers; errors before the first token are set on `started`."""
        check_request(model, inputs, gen_config)
        loop, queue, request = asyncio.get_running_loop(), asyncio.Queue(), REQUEST.get()
        tokenizer = getattr(processor, "tokenizer", processor)._tokenizer
        streamer = Streamer(request, tokenizer, loop, queue, response_parser=response_parser)

        def fail(error):
            if request.started.done():
                queue.put_nowait(_StreamError(json.dumps(str(error))[1:-1]))  # transformers inserts it between quotes
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
        """Same as transformers; stops when the client disconnects."""
        check_request(model, inputs, gen_config)
        inputs = {**inputs, "streamer": Stop(REQUEST.get())}
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def async_submit(self, fn, *args, **kwargs):
        """Shield the future, because the thread also sets the result of a cancelled request."""
        return asyncio.shield(super().async_submit(fn, *args, **kwargs))


class Stop:
    """A streamer that ends the generation once the client has disconnected."""

    def __init__(self, request):
        self.request = request

    def put(self, _):
        if self.request.gone:
            raise _GenerationCancelled

    def end(self):
        pass


class Streamer(DirectStreamer):
    """transformers' streamer, which also reports the first token."""

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
