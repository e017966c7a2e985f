"""llama.cpp through xllamacpp, a prebuilt wheel for any x86-64. Settings: gguf, threads, eos_ids, context.

The bindings return text only, so token ids are read from its HTTP server on the loopback address.
"""

import json
from http.client import HTTPConnection
from urllib.parse import urlsplit

import xllamacpp
from protocol import FirstToken, serve


def load(settings):
    params, first = xllamacpp.CommonParams(), FirstToken()
    params.model.path = settings["gguf"]
    params.n_ctx, params.n_parallel, params.cache_ram_mib = settings["context"], 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    server = xllamacpp.Server(params)  # on a free port of 127.0.0.1
    place = urlsplit(server.listening_address).netloc

    def answer(prompt_ids, max_new_tokens):
        first.begin()
        request = {"prompt": prompt_ids, "n_predict": max_new_tokens, "temperature": 0.0, "cache_prompt": False,
                   "return_tokens": True, "stream": True}  # fmt: skip
        connection = HTTPConnection(place)  # a new one, because the server closes idle connections
        connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
        response, ids, part = connection.getresponse(), [], {}
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line.removeprefix(b"data: "))
            if part.get("tokens"):
                first.seen()
                ids += part["tokens"]
        connection.close()
        if not part.get("stop"):
            raise RuntimeError(f"the answer did not end: {response.status} {str(part)[:300]}")
        if part.get("stop_type") == "eos" and len(ids) < part["tokens_predicted"]:
            ids.append(settings["eos_ids"][0])  # the server does not send it
        return ids, first.seconds, None

    answer.server = server  # keeps the server alive
    return answer


if __name__ == "__main__":
    serve(load, ["xllamacpp"])
