"""What a worker of `benchmarks/peers.py` says on its standard streams, in JSON lines.

It gets its settings as a JSON object, its only argument. When the model is loaded it says `{"ready": true, "versions":
{...}, "load_seconds": s}`. Then every line `{"prompt_ids": [...], "max_new_tokens": n}` is answered by `{"ids": [...],
"prefill_seconds": s, "seconds": s, "tau": t}`: the new tokens, greedy, up to and with the first that ends an answer;
the seconds until the first of them was there, and until the last was; tokens per forward, or null. What goes wrong is
`{"error": "..."}`, and the worker ends. Between the lines it sleeps in `readline`.

Runs in environments without hf_specdec: it imports the standard library alone.
"""

import json
import os
import sys
import time
from importlib.metadata import version


def settings():
    """The worker's argument."""
    return json.loads(sys.argv[1])


def serve(load, packages):
    """Load a model, then answer until standard input ends.

    Args:
        load: Takes the settings; returns a function of the prompt's ids and of the number of new tokens, which returns
            ids, seconds to the first token and tau (or None).
        packages: Distributions whose versions are told.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to standard error

    def say(**values):
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    try:
        begin = time.perf_counter()
        answer = load(settings())
        versions = {name: version(name) for name in packages}
        say(ready=True, versions=versions, load_seconds=time.perf_counter() - begin)
        while line := sys.stdin.readline():
            asked = json.loads(line)
            begin = time.perf_counter()
            ids, prefill_seconds, tau = answer(asked["prompt_ids"], asked["max_new_tokens"])
            say(ids=ids, prefill_seconds=prefill_seconds, seconds=time.perf_counter() - begin, tau=tau)
    except Exception as error:
        say(error=f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
        raise


class FirstToken:
    """Notes down when the first token was there: `begin()` before the prompt, `seen()` after any token."""

    def begin(self):
        self.started, self.seconds = time.perf_counter(), None

    def seen(self):
        if self.seconds is None:
            self.seconds = time.perf_counter() - self.started
