"""What only an accelerator shows; skipped with the reason on a machine without one.

`test_simulated_device.py` runs each of these tests once on the simulated device, so that no line can rot unseen.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HqqConfig, QuantoConfig

import drafters
import zoo
from hf_specdec import SpeculativeGenerationMixin, UnsupportedGenerationError
from hf_specdec.verification import device_attention, graph_backends, graphs
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
def test_graphs_on_the_device(model: Any, batch_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Every shape is captured when it comes up for the third time; the answers stay."""
    caplog.set_level("INFO", "hf_specdec")
    plain = generate(model, batch_size)
    for _ in range(4):
        assert torch.equal(plain, generate(model, batch_size, speculative={"method": "prompt_lookup", "top_k": 2}))
    program = model._speculation.programs.get("cuda_graph")
    if program is not None and program.runner is not None:
        assert program.runner.captured_keys()
    assert "are not joined" not in caplog.text  # products with the same input were timed


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_graphs_of_exact_calls_on_the_device(
    on_device: Callable[[Any], Any], name: str, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with drafts of every kind: the ids of plain decoding on graphs, run after run."""
    if SIMULATED:
        monkeypatch.setattr(device_attention, "needs_no_masks", lambda *_: True)
    model = SpeculativeGenerationMixin.attach(on_device(copy.deepcopy(zoo.build(name)).to(torch.bfloat16)))
    exact = {"exact": True, "compile": "cuda_graph"}
    try:
        plain = generate(model, batch_size, max_new_tokens=64, speculative={"method": "plain", **exact})
    except UnsupportedGenerationError as error:
        pytest.skip(str(error))
    for row in drafters.ROWS if not SIMULATED else [drafters.BY_NAME["eagle3"]]:
        config = {**row.add(model, plain[:, -64:].cpu()), **exact}
        for _ in range(3):
            assert torch.equal(plain, generate(model, batch_size, max_new_tokens=64, speculative=config)), row.name


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


def in_thread(device: torch.device, work: Callable[[], Any]) -> Any:
    """Run something in another thread, on a stream of its own."""
    module = torch.get_device_module(device)
    if SIMULATED:
        from simulated_device import Uploads
    with Uploads() if SIMULATED else nullcontext(), module.stream(module.Stream()):
        return work()


def unseeded(model: Any, batch_size: int, **options: Any) -> list[list[int]]:
    """Greedy answers unless the options say otherwise; a seed would touch the generator, too."""
    ids, mask = (tensor.to(model.device) for tensor in prompts(batch_size))
    output = model.generate(ids, attention_mask=mask, **{"max_new_tokens": 32, "do_sample": False, **options})
    return output.to("cpu").tolist()


@pytest.mark.parametrize("batch_size", [3])
def test_graphs_are_captured_beside_a_thread_that_samples(model: Any, batch_size: int) -> None:
    """Up to torch 2.11, drawing and reading the generator's state fail while another thread captures."""
    plain, turns = unseeded(model, batch_size), range(2 if SIMULATED else 10)

    def sample() -> None:
        for _ in turns:
            unseeded(model, 1, do_sample=True, speculative="prompt_lookup")

    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(in_thread, model.device, sample)
        for _ in turns:
            model.release_memory()
            for _ in range(4):
                assert plain == unseeded(model, batch_size, speculative="prompt_lookup")
        sampling.result()


@pytest.mark.parametrize("batch_size", [3])
def test_graphs_of_two_threads_on_two_streams(model: Any, batch_size: int) -> None:
    """200 calls over the same buffers and the same memory: each gets its own results."""
    kept = graphs.Graphed(graph_backends.GRAPH_BACKENDS[model.device.type](model.device), "It")

    def slow(given: Any) -> list[Any]:
        total = given
        for _ in range(20):  # long enough for the host to be ahead
            total = total + given
        return [total]

    def work(first: int) -> None:
        ones = torch.ones(batch_size, 8 if SIMULATED else 2**18, device=model.device)
        found = [kept((batch_size,), slow, graphs.Input(ones * (first + number)))[0][0, :1] for number in range(100)]
        assert torch.cat(found).tolist() == [21 * (first + number) for number in range(100)]

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(in_thread, model.device, lambda first=first: work(first)) for first in (0, 1000)]:
            done.result()
    assert kept.captured_keys()
    plain = unseeded(model, batch_size)

    def generating() -> None:
        for _ in range(2 if SIMULATED else 20):
            assert plain == unseeded(model, batch_size, speculative="prompt_lookup")

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(in_thread, model.device, generating) for _ in range(2)]:
            done.result()
