"""JSON-lines protocol between `benchmarks/peers.py` and its workers, on standard input and output.

The only argument of a worker is a JSON object of settings. After loading the model it writes `{"ready": true,
"versions": {...}, "load_seconds": s}`. It then answers every line `{"prompt_ids": [...], "max_new_tokens": n}` with
`{"ids": [...], "prefill_seconds": s, "seconds": s, "tau": t}`: the new greedy tokens including the EOS, the seconds to
the first and to the last token, and tokens per forward or null. On an error it writes `{"error": "..."}` and ends.

Runs in environments without hf_specdec and imports only the standard library.
"""

import json
import os
import sys
import time
from importlib.metadata import version


def settings():
    """Return the worker's settings."""
    return json.loads(sys.argv[1])


def serve(load, packages):
    """Load a model, then answer until standard input ends.

    Args:
        load: Takes the settings and returns a function `(prompt_ids, max_new_tokens) -> (ids, seconds to the first
            token, tau or None)`.
        packages: Distributions whose versions are reported.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to standard error

    def send(**values):
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    try:
        begin = time.perf_counter()
        answer = load(settings())
        versions = {name: version(name) for name in packages}
        send(ready=True, versions=versions, load_seconds=time.perf_counter() - begin)
        while line := sys.stdin.readline():
            request = json.loads(line)
            begin = time.perf_counter()
            ids, prefill_seconds, tau = answer(request["prompt_ids"], request["max_new_tokens"])
            send(ids=ids, prefill_seconds=prefill_seconds, seconds=time.perf_counter() - begin, tau=tau)
    except Exception as error:
        send(error=f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
        raise


class FirstToken:
    """Records the time to the first token: call `begin()` before the prompt and `seen()` after every token."""

    def begin(self):
        self.started, self.seconds = time.perf_counter(), None

    def seen(self):
        if self.seconds is None:
            self.seconds = time.perf_counter() - self.started
