"""`auto` on a GPU of which only the clock is modelled: the real small model, its head, and twelve unseen questions.

The clock follows the rows of an H100 (benchmarks/results/gpu_h100.json): what the host launches takes as long as that
in an eager forward of 22 ms, a replay 1.6 ms a forward and 10 microseconds a node, a capture 0.3 s. Everything else
is real, so that prices, captures and acceptance are those of a GPU with this clock. It runs in a process of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import simulated_device
from conftest import SHIPPED_HEAD
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.verification import device_attention, graph_backends, memory
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import CAPTURE_AFTER, Graphed
from simulated_device import VIEWS, Graph, captures_here, move, simulation

LAUNCH, REPLAY, NODE, CAPTURE = 0.022, 0.0016, 10e-6, 0.3
"""Seconds of an eager forward, of a replayed one, of one of its nodes, and of a capture."""
QUESTIONS = Path(__file__).parents[1] / "benchmarks" / "unseen_prompts.jsonl"
CATEGORIES = ("chat", "qa", "math", "translation", "summarization", "rag")
NEW_TOKENS = 64
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear"})


@dataclass
class ModelledGpu:
    """The clock, and how much of the time is none of a replay's.

    Args:
        launches: Operations that an eager forward launches.
        weights: Elements of all weights, which a node multiplies.
    """

    launches: int
    weights: int
    now: float = 0.0
    one_time: float = 0.0  # seconds in runs without a graph that captures replace, and in captures
    num_graphs: int = 0

    def launch(self, name: str) -> None:
        if name not in VIEWS and name != "graph" and not captures_here():
            self.now += LAUNCH / self.launches

    def seconds(self, graph: Graph) -> float:
        """What a replay takes: its operations, and the weights that its rows are multiplied with."""
        found = 0.0
        for op, args, _, out in graph.tape:
            name = getattr(op, "__name__", "").partition(".")[0]
            if name not in VIEWS:
                found += REPLAY / self.launches
            if name in PRODUCTS and isinstance(out, Tensor):
                weight = max((arg.numel() for arg in args if isinstance(arg, Tensor)), default=0)
                found += NODE * (out.numel() // out.shape[-1]) * weight / self.weights
        return found


@pytest.fixture
def gpu(small_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModelledGpu, Any, Any]]:
    """The clock, the attached model on the simulated device, and its tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(small_model_path)
    model = AutoModelForCausalLM.from_pretrained(small_model_path, dtype=torch.float32)
    with simulation():
        attached: Any = SpeculativeGenerationMixin.attach(move(model))
        simulated_device.launches.clear()
        with torch.inference_mode():
            model(torch.zeros(1, 8, dtype=torch.long).to("sim"), use_cache=False)
        clock = ModelledGpu(len(simulated_device.launches), sum(weight.numel() for weight in model.parameters()))
        note_launch, run = simulated_device.note_launch, Graphed._run

        def noting(name: str) -> None:
            note_launch(name)
            clock.launch(name)

        class Backend(GraphBackend):
            total_bytes = 80 * 2**30

            def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
                graph = Graph()
                with graph.capture():
                    run()
                clock.now, clock.num_graphs, seconds = clock.now + CAPTURE, clock.num_graphs + 1, clock.seconds(graph)

                def replay() -> None:
                    graph.replay()
                    clock.now += seconds

                return replay

        def timed_run(graphed: Graphed, shape: Any) -> None:
            begin, is_replay = clock.now, shape.replay is not None
            run(graphed, shape)
            if not is_replay:
                clock.one_time += clock.now - begin

        monkeypatch.setattr(simulated_device, "note_launch", noting)
        monkeypatch.setitem(graph_backends.GRAPH_BACKENDS, "sim", Backend)
        monkeypatch.setattr(device_attention, "needs_no_masks", lambda *_: True)
        monkeypatch.setattr(memory, "FIRST_KEPT_SLOTS", 1024)  # the simulation attends to all slots
        monkeypatch.setattr(Graphed, "_run", timed_run)
        monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
        yield clock, attached, tokenizer


@dataclass(frozen=True)
class Answer:
    """What one question took on the clock."""

    tokens: int
    forwards: int
    seconds: float
    one_time: float
    num_graphs: int


def answers(gpu: tuple[ModelledGpu, Any, Any], speculative: str) -> list[Answer]:
    """Answer two questions of each category, the categories in turn."""
    clock, model, tokenizer = gpu
    rows, found = [json.loads(line) for line in QUESTIONS.read_text().splitlines()], []
    for index, category in [(index, category) for index in range(2) for category in CATEGORIES]:
        question = [row for row in rows if row["category"] == category][index]["turns"][0]
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids, begin, one_time, graphs = prompt["input_ids"], clock.now, clock.one_time, clock.num_graphs
        mask = torch.ones_like(ids).to("sim")
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "speculative": speculative}
        output = model.generate(ids.to("sim"), attention_mask=mask, **options)
        forwards = model.last_speculation.num_target_forwards
        taken = clock.now - begin, clock.one_time - one_time, clock.num_graphs - graphs
        found.append(Answer(output.shape[1] - ids.shape[1] - 1, forwards, *taken))
        print(speculative, category, found[-1])  # shown by pytest -s
    return found


def test_auto_drafts_as_well_as_its_head_with_few_graphs(gpu: tuple[ModelledGpu, Any, Any]) -> None:
    """Prices learned from eager runs, or a graph for every size of a tree or text, would make it plain and slow."""
    gpu[1].load_drafter(SHIPPED_HEAD, verify=False)
    auto, eagle = answers(gpu, "auto"), answers(gpu, "eagle")
    tau = {name: sum(a.tokens for a in rows) / sum(a.forwards for a in rows)
           for name, rows in (("auto", auto), ("eagle", eagle))}  # fmt: skip
    later = auto[CAPTURE_AFTER + 1 :]  # what runs once an answer, a head's first draft, has been captured by then
    share = sum(answer.one_time for answer in later) / sum(answer.seconds for answer in later)
    print(f"graphs {sum(answer.num_graphs for answer in auto)}, one-time share {share:.3f}, tau {tau}")
    assert sum(answer.num_graphs for answer in auto) <= 12
    assert share <= 0.15
    assert tau["auto"] >= 0.97 * tau["eagle"]
