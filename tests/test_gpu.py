"""What only an accelerator shows; skipped with the reason on a machine without one.

`test_simulated_device.py` runs each of these tests once on the simulated device, so that no line can rot unseen.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HqqConfig, QuantoConfig

import drafters
import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.verification import graph_backends
from models import prompts

SIMULATED = "SPECDEC_SIMULATED_DEVICE" in os.environ
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not SIMULATED and not torch.accelerator.is_available(), reason="needs an accelerator, this machine has none"
    ),
]


@pytest.fixture(scope="module")
def on_device() -> Iterator[Callable[[Any], Any]]:
    """What puts a model on the device."""
    if not SIMULATED:
        yield lambda model: model.to(torch.accelerator.current_accelerator())
        return
    from graphs_on_simulated_device import SimGraphBackend
    from simulated_device import move, simulation

    with pytest.MonkeyPatch.context() as patch, simulation():
        patch.setitem(graph_backends.GRAPH_BACKENDS, "sim", SimGraphBackend)
        yield move


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "deepseek_v3", "gpt2", "qwen3_next"])
def model(request: pytest.FixtureRequest, on_device: Callable[[Any], Any]) -> Any:
    return SpeculativeGenerationMixin.attach(on_device(copy.deepcopy(zoo.build(request.param))))


def generate(model: Any, batch_size: int, **options: Any) -> Any:
    ids, mask = (tensor.to(model.device) for tensor in prompts(batch_size))
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=mask, **{"max_new_tokens": 32, "do_sample": False, **options})


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("row", drafters.ROWS, ids=lambda row: row.name)
def test_equal_to_plain_generate_on_the_device(model: Any, row: drafters.Row, batch_size: int) -> None:
    plain = generate(model, batch_size)
    config = row.add(model, plain[:, -32:].cpu())
    assert torch.equal(plain, generate(model, batch_size, speculative=config))


@pytest.mark.parametrize("row", drafters.ROWS, ids=lambda row: row.name)
def test_the_same_tokens_are_drawn_on_the_device(model: Any, row: drafters.Row) -> None:
    sampling = {"do_sample": True, "top_k": 8, "temperature": 0.7}
    plain = generate(model, 1, **sampling)
    config = row.add(model, plain[:, -32:].cpu())
    assert torch.equal(plain, generate(model, 1, speculative=config, **sampling))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_auto_on_the_device(model: Any, batch_size: int) -> None:
    """Costs are measured there, and real steps, which the host does not wait for, keep them true."""
    drafters.BY_NAME["eagle"].add(model)
    auto = {"method": "auto", "methods": ["eagle", "prompt_lookup"]}
    plain = generate(model, batch_size, max_new_tokens=64)
    for _ in range(2):
        assert torch.equal(plain, generate(model, batch_size, max_new_tokens=64, speculative=auto))
    _, costs = model._speculation.costs[0]
    assert all(0 < seconds < 1 for seconds in costs.table())


@pytest.mark.parametrize("batch_size", [1, 3])
def test_graphs_on_the_device(model: Any, batch_size: int) -> None:
    """Every shape is captured when it comes up for the third time; the answers stay."""
    plain = generate(model, batch_size)
    for _ in range(4):
        assert torch.equal(plain, generate(model, batch_size, speculative={"method": "prompt_lookup", "top_k": 2}))
    program = model._speculation.programs.get("cuda_graph")
    if program is not None and program.runner is not None:
        assert program.runner.captured_keys()


@pytest.mark.parametrize(("package", "config"), [
    ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_4bit=True)),
    ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    ("hqq", lambda: HqqConfig(nbits=4, group_size=32)),
    ("optimum.quanto", lambda: QuantoConfig(weights="int8")),
], ids=["bitsandbytes-4", "bitsandbytes-8", "hqq-4", "quanto-8"])  # fmt: skip
def test_quantised_targets_on_the_device(package: str, config: Callable[[], Any], tmp_path: Path) -> None:
    """What cannot be captured runs without a graph; on the simulated device, quanto runs on the CPU."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    device = torch.device("cpu") if SIMULATED else torch.accelerator.current_accelerator()
    zoo.shallow("llama", 2).save_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config(), device_map=device, dtype=torch.float32
    )
    model = SpeculativeGenerationMixin.attach(model)
    model.generation_config.eos_token_id = None
    plain = generate(model, 1)
    for compiles in ("none", "none" if SIMULATED else "cuda_graph"):
        settings = {"method": "token_recycling", "compile": compiles}
        assert torch.equal(plain, generate(model, 1, speculative=settings))
