"""llama.cpp through llama-cpp-python, built by pip for this machine. Settings: gguf, threads, eos_ids, context."""

from llama_cpp import Llama
from protocol import FirstToken, serve


def load(settings):
    threads, first = settings["threads"], FirstToken()
    model = Llama(
        settings["gguf"], n_ctx=settings["context"], n_threads=threads, n_threads_batch=threads, verbose=False,
        logits_all=False,
    )  # fmt: skip

    def answer(prompt_ids, max_new_tokens):
        first.begin()
        model.reset()  # no cached prefix
        ids = []
        for token in model.generate(prompt_ids, temp=0.0, top_k=1, repeat_penalty=1.0, reset=False):
            first.seen()
            ids.append(token)
            if token in settings["eos_ids"] or len(ids) == max_new_tokens:
                return ids, first.seconds, None
        raise RuntimeError(f"the answer ended after {len(ids)} tokens")

    return answer


if __name__ == "__main__":
    serve(load, ["llama-cpp-python"])
