"""An OpenAI-compatible server: transformers' own `transformers serve`, whose model speculates.

    pip install 'transformers[serving]'
    python examples/serve.py org/model --drafter org/head --port 8000

    from openai import OpenAI
    client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    client.chat.completions.create(model="org/model", messages=[{"role": "user", "content": "Why is the sky blue?"}])

Attaching works in place, and what `generation_config.speculative` says is the default of every call; so a server that
knows nothing of speculation uses it, streaming included. One request at a time: for many there are engines.
"""

import argparse

from transformers.cli.serve import Serve

from hf_specdec import SpeculativeGenerationMixin


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
    server = Serve(force_model=name, port=port, non_blocking=True)
    (loaded,) = server._model_manager.loaded_models.values()
    model = SpeculativeGenerationMixin.attach(loaded.model)
    if drafter:
        model.load_drafter(drafter)
    model.generation_config.speculative = method
    return server, model


if __name__ == "__main__":
    main()
