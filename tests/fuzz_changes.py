"""Differential fuzz of what people do to a model between two calls: plain against speculative after every change.

    python tests/fuzz_changes.py --count 2000 [--seed 0]

A case takes a tiny model, changes it up to four times (quantise, wrap, hook, adapt, cast, switch modes, ...), and
after each change runs a random combination of options of `fuzz.py`. An answer is *equal*, *refused*, *invalid* or
*sampled* as there; a mixture is refused too: a forward that mixes the tokens of a batch has no answer that a tree
could keep.
"""

from __future__ import annotations

import argparse
import copy
import pickle
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import nn

import fuzz
import zoo
from hf_specdec import DrafterMismatchError, UnsupportedGenerationError, UnsupportedModelError

MODELS = ("llama", "gemma3_text", "mistral", "gpt_neox", "deepseek_v3", "bloom", "qwen3_next", "lfm2")
"""Without dropout: in train mode their answers are as sure as in evaluation."""

Change = Callable[[Any, random.Random], Any]
"""Changes a model, or returns another one to go on with."""


class Wrapped(nn.Module):
    """A layer whose input is shifted: by a constant, or by the mean of the whole batch, which mixes tokens."""

    def __init__(self, inner: nn.Module, mixes: bool) -> None:
        super().__init__()
        self.inner, self.mixes = inner, mixes

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(shifted(hidden, self.mixes))


def shifted(hidden: torch.Tensor, mixes: bool) -> torch.Tensor:
    return hidden + (hidden.abs().mean() if mixes else 0.1)


def _linear(model: Any, rng: random.Random) -> tuple[Any, str, nn.Linear]:
    """A linear layer, its parent and its name there."""
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and child is not model.get_output_embeddings()
    ]
    return rng.choice(found)


def wrap(model: Any, rng: random.Random) -> None:
    parent, name, layer = _linear(model, rng)
    setattr(parent, name, Wrapped(layer, rng.random() < 0.5).train(layer.training))


def hook(model: Any, rng: random.Random) -> None:
    mixes = rng.random() < 0.5
    _linear(model, rng)[2].register_forward_pre_hook(lambda _module, inputs: (shifted(inputs[0], mixes),))


def unhook(model: Any, rng: random.Random) -> None:
    for module in model.modules():
        module._forward_pre_hooks.clear()


def replace_forward(model: Any, rng: random.Random) -> None:
    layer, mixes = _linear(model, rng)[2], rng.random() < 0.5
    plain = layer.forward
    layer.forward = lambda hidden: plain(shifted(hidden, mixes))


def quantise(model: Any, rng: random.Random) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def adapt(model: Any, rng: random.Random) -> None:
    name = f"adapter{rng.randrange(10**6)}"
    targets = sorted({name for module in model.modules() for name, child in module.named_children()
                      if isinstance(child, nn.Linear) and child is not model.get_output_embeddings()})  # fmt: skip
    config = peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, target_modules=[rng.choice(targets)])
    model.add_adapter(config, adapter_name=name)


def switch_adapters(model: Any, rng: random.Random) -> None:
    if getattr(model, "peft_config", None):
        rng.choice([model.disable_adapters, model.enable_adapters])()


def cast(model: Any, rng: random.Random) -> None:
    model.to(rng.choice([torch.float64, torch.float32]))


def switch_mode(model: Any, rng: random.Random) -> None:
    rng.choice([model, *model.modules()]).train(rng.random() < 0.6)


def checkpoint(model: Any, rng: random.Random) -> None:
    rng.choice([model.gradient_checkpointing_enable, model.gradient_checkpointing_disable])()


def other_attention(model: Any, rng: random.Random) -> None:
    model.set_attn_implementation(rng.choice(["eager", "sdpa"]))


def other_window(model: Any, rng: random.Random) -> None:
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = rng.choice([4, 6, 11])


def other_weights(model: Any, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(2**31))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn_like(parameter))


def resize(model: Any, rng: random.Random) -> None:
    model.resize_token_embeddings(zoo.VOCAB_SIZE + rng.choice([0, 8]))


def copied(model: Any, rng: random.Random) -> Any:
    return copy.deepcopy(model)


def pickled(model: Any, rng: random.Random) -> Any:
    try:
        return pickle.loads(pickle.dumps(model))
    except (AttributeError, pickle.PicklingError, TypeError):  # lambdas above, adapters' own
        return model


CHANGES: tuple[Change, ...] = (
    wrap, hook, unhook, replace_forward, quantise, adapt, adapt, switch_adapters, cast, cast, switch_mode, switch_mode,
    checkpoint, other_attention, other_window, other_weights, resize, copied, pickled,
)  # fmt: skip


def check(number: int) -> list[str]:
    """The outcomes of one case, one per change.

    Raises:
        AssertionError: An answer differs; the text names the changes.
    """
    rng = random.Random(f"changes {number}")
    model, outcomes, made_so_far = fuzz.with_heads(rng.choice(MODELS)), [], []
    for turn in range(rng.randint(1, 4)):
        change = rng.choice(CHANGES)
        try:
            model = change(model, rng) or model
        except Exception as error:  # torch, peft or transformers cannot do that to this model: no change, no case
            made_so_far.append(f"({change.__name__}: {type(error).__name__})")
            continue
        made_so_far.append(change.__name__)
        case = fuzz.case(100_000 + 10 * number + turn)
        case.changed = model
        row = fuzz.BY_NAME[case.drafter]
        if row.make is not None and not row.knows_answers and row.method not in model.drafters:
            case.drafter = "prompt_lookup"
        try:
            outcomes.append(fuzz.check(case))
        except (UnsupportedModelError, UnsupportedGenerationError, DrafterMismatchError):
            outcomes.append("refused")
        except Exception as error:
            changes = f"{type(model).__name__} after {', '.join(made_so_far)}"
            raise AssertionError(f"{changes}: {case}: {type(error).__name__}: {error}") from error
    return outcomes


def main() -> None:
    """Run many cases; the exit status is 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    for number in range(arguments.seed, arguments.seed + arguments.count):
        try:
            outcomes.update(check(number))
        except AssertionError as error:
            outcomes["DIFFERENT"] += 1
            print(f"case {number}: {error}", flush=True)
    print(dict(outcomes))
    sys.exit(1 if outcomes["DIFFERENT"] else 0)


if __name__ == "__main__":
    main()
