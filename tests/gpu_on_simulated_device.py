"""The tests of `test_gpu.py` on the simulated device: one kind of model, and every test function at least once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from graphs_on_simulated_device import SimGraphBackend
from hf_specdec.verification import graph_backends
from simulated_device import move, simulation
from test_gpu import *  # noqa: F403

pytestmark: list[Any] = []  # not skipped here


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, simulation():
        patch.setitem(graph_backends.GRAPH_BACKENDS, "sim", SimGraphBackend)
        yield


@pytest.fixture(scope="module")
def on_device() -> Callable[[nn.Module], nn.Module]:
    return move
