"""Graphs on the second device: every step replayed with other contents, lengths and trees gives plain answers."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList

import drafters
import zoo
from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, UnsupportedGenerationError
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.control.costs import StepCosts
from hf_specdec.control.policy import QueryStats, Width
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.drafters.feature_session import FeatureSession
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.token_recycling import RecycledTokens, TokenRecyclingDrafter
from hf_specdec.generation import model_programs
from hf_specdec.generation.state import current_costs, current_facts
from hf_specdec.heads import stages
from hf_specdec.verification import device_attention, graph_backends, graphs, memory, programs, runners
from hf_specdec.verification.captured import GraphForward
from hf_specdec.verification.device_attention import VisibleKeys, attend_exactly
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import CAPTURE_AFTER
from hf_specdec.verification.masks import MaskLayout
from hf_specdec.verification.memory import bucket_of
from hf_specdec.verification.programs import CaptureError
from hf_specdec.verification.runners import CompiledForward
from models import prompts
from simulated_device import (
    DEFAULT,
    SIM,
    Graph,
    SimTensor,
    Stream,
    Uploads,
    attention_shapes,
    captures_here,
    current_stream,
    invalidate,
    launches,
    made_of_others,
    move,
    note_launch,
    note_use,
    races,
    reads,
    recorded,
    simulation,
    tensors_in,
    touched,
    use_stream,
)
from torch_modes import MODES

READS = (("tolist", "host_sync.py:read"), ("synchronize", "acceptance/accepted.py:finish"))
CAPTURED = {"compile": "cuda_graph"}
LOOKUP = {"method": "prompt_lookup", **CAPTURED}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20}


class FailingTape(list[Any]):
    """A device that gives up at the n-th operation of a capture, or at its end where there are fewer."""

    def __init__(self, last: int, error: Exception) -> None:
        super().__init__()
        self._last, self._error = last, error

    def append(self, entry: Any) -> None:
        super().append(entry)
        if len(self) > self._last:
            raise self._error


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class PreparedGraph(Graph):
    """Takes its tape apart once, not at every replay: these tests replay and poison thousands of times."""

    @cached_property
    def _steps(self) -> list[tuple[Callable[[], Any], list[Tensor]]]:
        return [(partial(op, *args, **kwargs), tensors_in(out)) for op, args, kwargs, out in self.tape]

    @cached_property
    def _taken(self) -> list[Tensor]:
        """All memory that the block took, every piece once and whole."""
        taken: dict[int, Tensor] = {}
        known: set[int] = set()
        for _, args, kwargs, out in self.tape:
            given = {place_of(tensor) for tensor in tensors_in((args, kwargs))}
            for tensor in tensors_in(out):
                if place_of(tensor) not in given | known | taken.keys():
                    taken[place_of(tensor)] = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            known |= given - taken.keys()
        return list(taken.values())

    @cached_property
    def _touched(self) -> tuple[list[Tensor], list[Tensor]]:
        """What it reads and writes, every piece of memory once."""
        sides = zip(*(touched(*entry) for entry in self.tape), strict=True)
        read, written = ({place_of(tensor): tensor for part in side for tensor in part} for side in sides)
        return list(read.values()), list(written.values())

    @torch.inference_mode()
    def replay(self) -> None:
        note_launch("graph")
        if current_stream() is not DEFAULT:
            note_use("replay", *self._touched)
        with torch._C.DisableTorchFunction():  # all of it is the CPU's
            for run, made in self._steps:
                found = run()
                for was, now in zip(made, [found] if isinstance(found, Tensor) else tensors_in(found), strict=True):
                    if was.data_ptr() != now.data_ptr():
                        was.copy_(now)

    @torch.inference_mode()
    def poison(self) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in self._taken:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


class SimGraphBackend(GraphBackend):
    """Captures with the simulation's graphs; before a replay, the memory of this graph and another is overwritten."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.graphs: list[Graph] = []
        self.replays = 0
        self.failures: list[tuple[int, Exception]] = []  # of the next captures: at which operation, with what
        self.on_capture: Callable[[], None] = lambda: None
        self._pool = torch.empty(1)  # stands for the memory that all graphs share

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = PreparedGraph()
        if self.failures:
            graph.tape = FailingTape(*self.failures.pop(0))
        with graph.capture():
            run()
        self.on_capture()
        self.graphs.append(graph)

        def replay() -> None:
            self.replays += 1
            if current_stream() is not DEFAULT:
                note_use("pool", [], [self._pool])
            for other in (graph, self.graphs[self.replays % len(self.graphs)]):
                other.poison()
            graph.replay()

        return replay


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short texts meet several buckets here."""
    monkeypatch.setitem(graph_backends.GRAPH_BACKENDS, "sim", SimGraphBackend)
    monkeypatch.setattr(memory, "SHORTEST_BUCKET", 16)
    monkeypatch.setattr(memory, "FIRST_KEPT_SLOTS", 16)
    with simulation():
        yield


def attached(name: str = "llama") -> Any:
    model = zoo.shallow(name, 2) if name == "llama" else copy.deepcopy(zoo.build(name))
    return SpeculativeGenerationMixin.attach(move(model))


@pytest.fixture
def llama() -> Any:
    return attached()


def generate(model: Any, rows: int, speculative: Any, **options: Any) -> list[list[int]]:
    ids, mask = prompts(rows)
    torch.manual_seed(4)
    given = {"max_new_tokens": 20, "do_sample": False, **options}
    output = model.generate(ids.to("sim"), attention_mask=mask.to("sim"), speculative=speculative, **given)
    found: list[list[int]] = (output.raw if isinstance(output, SimTensor) else output).tolist()
    return found


@cache
def longest_plain(rows: int) -> list[list[int]]:
    return generate(attached(), rows, None, max_new_tokens=30)


def plain_llama(rows: int, length: int = 20) -> list[list[int]]:
    """Plain answers of the tiny Llama on the device: every test has a model of its own, and all are alike."""
    return [row[: 21 + length] for row in longest_plain(rows)]


def runner_of(model: Any) -> Any:
    return model._speculation.programs["cuda_graph"].runner


OF_EVERY_KIND = ("sometimes", "eagle3")


def backend_of(model: Any) -> SimGraphBackend:
    backend: SimGraphBackend = runner_of(model)._graphed._backend
    return backend


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_5_text"])
def kept(request: pytest.FixtureRequest) -> tuple[Any, dict[Any, Any]]:
    """A model and its plain answers: full attention, and sliding windows besides."""
    with simulation():
        model = attached(request.param)
        found = {(rows, sampled): generate(model, rows, None, **(SAMPLED if sampled else {}))
                 for rows, sampled in ((1, False), (3, False), (1, True))}  # fmt: skip
    return model, found


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("row", drafters.ROWS, ids=lambda row: row.name)
def test_every_drafter_answers_plainly_on_graphs_with_one_read_per_step(
    kept: tuple[Any, dict[Any, Any]], row: drafters.Row, rows: int
) -> None:
    model, plain = kept
    config = {**row.add(model, torch.tensor(plain[rows, False])[:, 21:]), **CAPTURED}
    if row.name not in OF_EVERY_KIND and (rows == 3 or model.config.model_type != "llama"):
        pytest.skip("several rows, and a second kind of model, are tried with some")
    for _ in range(2):
        generate(model, rows, config)
    backend = backend_of(model)
    before = backend.replays
    reads.clear()
    assert generate(model, rows, config) == plain[rows, False]
    assert backend.replays > before
    in_verify = [place for _, place in reads if place.startswith("verification/") and "prefill" not in place]
    captured = [
        place for place in in_verify if place == "verification/graphs.py:_capture"
    ]  # a first replay is compared
    assert len(in_verify) - len(captured) == sum(place == "verification/features.py:of" for place in in_verify)


made_of_others |= {
    "hf_specdec::tree_attention": runners._append_and_attend,
    "hf_specdec::rotated_attention": runners._rotate_append_and_attend,
    "hf_specdec::tree_convolution": runners._convolve,
    "hf_specdec::tree_recurrence": runners._recur,
    "hf_specdec_draft::attend": lambda *given: stages._ATTEND.get()(*given).contiguous(),
}


def trace_on_the_host(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    """Traces cannot have the device's tensors: let them see its memory, and put its tensors back into the graph."""
    own = programs._traced

    def traced(step: Any, inputs: Any, *, record: Any = None) -> Any:
        there: dict[int, SimTensor] = {}
        with pytest.MonkeyPatch.context() as swap:
            for part in model.modules():
                for table in (part._parameters, part._buffers):
                    for name, value in table.items():
                        if value is not None:
                            there[value.raw.data_ptr()] = value
                            swap.setitem(table, name, value.raw)
            graph = own(step, [tensor.raw for tensor in inputs], record=record)
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                value = getattr(graph, node.target)
                delattr(graph, node.target)
                setattr(graph, node.target, there.get(value.data_ptr()) if value.dim() else SimTensor(value))
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("sim:0")}
        return graph

    patch.setattr(programs, "_traced", traced)


@pytest.mark.parametrize(
    ("name", "rows", "drafter"),
    [("llama", 3, "eagle3"), ("gemma3_text", 1, "prompt_lookup"), ("qwen3_5_text", 3, "prompt_lookup")],
)
def test_graphs_of_fused_operations_answer_plainly(
    name: str, rows: int, drafter: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They have a third fewer operations, views and masks included; a head's graphs draft what they drafted."""
    sizes, drafted = list[int](), list[Any]()
    caplog.set_level(logging.INFO, "hf_specdec")
    for fuses in (False, True):
        model = attached(name)
        plain = generate(model, rows, None)
        config = {**drafters.BY_NAME[drafter].add(model), **CAPTURED}
        if fuses:
            for module in (model_programs, stages):
                monkeypatch.setattr(module, "FUSING_DEVICES", {"sim"})
            heads = [one.head for one in model.drafters.values() if hasattr(one, "head")]
            trace_on_the_host(monkeypatch, nn.ModuleList([model, *heads]))
        for _ in range(4):
            assert generate(model, rows, config) == plain
        drafted.append(model.last_speculation.accepted_per_step)
        assert isinstance(runner_of(model)._inner, CompiledForward) == fuses
        assert backend_of(model).replays > 0
        sizes.append(max(len(graph.tape) for graph in backend_of(model).graphs))
    assert sizes[1] < 0.7 * sizes[0], sizes
    assert drafted[0] == drafted[1]
    assert "not fused" not in caplog.text


@pytest.mark.parametrize(
    ("target", "name"), [("llama", "sometimes"), ("llama", "eagle"), ("qwen3_5_text", "sometimes")]
)
def test_finished_rows_leave_the_graphs_by_halves(target: str, name: str) -> None:
    llama = attached(target)
    plain = [row[21:] for row in generate(llama, 6, None, max_new_tokens=60)]
    ends = set[int]()
    for row in range(1, 6):
        ends |= set([token for token in plain[row][4 * row :] if token not in plain[0]][:1])
    options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": sorted(ends), "pad_token_id": 0}
    config = {**drafters.BY_NAME[name].add(llama, torch.tensor(plain)), **CAPTURED}
    assert generate(llama, 6, config, **options) == generate(llama, 6, None, **options)
    rows = {key[0] for key in runner_of(llama).captured_keys()}
    assert rows - {6} <= {4, 2, 1}
    assert min(rows) < 6


@pytest.mark.parametrize("name", ["auto", "medusa"])
def test_graphs_made_in_one_mode_are_replayed_in_another(llama: Any, name: str) -> None:
    """Every buffer of a graph, and the memory that it writes to, outlives the mode of the call that made it."""
    model, plain = llama, plain_llama(1)
    added = drafters.BY_NAME["eagle3" if name == "auto" else name].add(model)
    config = {**added, **CAPTURED} if name != "auto" else {"method": "auto", **CAPTURED}
    for mode in ("inference", "inference", "plain", "bfloat16", "inference"):
        with MODES[mode]():
            assert generate(model, 1, config) == plain, mode
    assert backend_of(model).replays > 0


def move_ids(ids: Tensor) -> Tensor:
    return ids.to("sim")


def test_a_call_that_fails_leaves_its_memory_to_the_next_one(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_llama(1)
    generate(llama, 1, LOOKUP)

    def fail(*_args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_specdec.generation.decode._Loop.begin_step", fail)
        with pytest.raises(KeyboardInterrupt) as error:
            generate(llama, 1, LOOKUP)
    replays = backend_of(llama).replays
    for _ in range(3):
        assert generate(llama, 1, LOOKUP) == plain
    assert backend_of(llama).replays > replays
    assert error.tb is not None  # it still holds the failed call's frames


def test_a_draft_layer_reads_and_grows_by_graphs() -> None:
    """With the drafts of the layer itself; beside another call, and for a prompt, without graphs."""
    model, row = attached(), drafters.BY_NAME["eagle3"]
    config = {**row.add(model), "num_draft_tokens": 12, "num_steps": 3, "top_k": 3}
    plain = plain_llama(1, 16)
    assert generate(model, 1, {**config, "compile": "none"}, max_new_tokens=16) == plain
    drafted = model.last_speculation.accepted_per_step
    for _ in range(3):
        assert generate(model, 1, {**config, **CAPTURED}, max_new_tokens=16) == plain
        assert model.last_speculation.accepted_per_step == drafted
    ((_, drafter),) = model._speculation.compiled[model.drafters[row.method]].values()
    drafted_by, captures = drafter.program.graphs, drafter.program.graphs.steps
    ids = torch.tensor([[9, 8, 7, 6, 5, 9, 8, 7]])  # another text over the same memory
    wanted = [model.generate(move_ids(ids), max_new_tokens=16, do_sample=False).raw.tolist()]
    for form in ("none", "cuda_graph"):
        text = {**config, "compile": form}
        wanted.append(model.generate(move_ids(ids), max_new_tokens=16, do_sample=False, speculative=text).raw.tolist())
        drafted = [*drafted, model.last_speculation.accepted_per_step]
    assert wanted[0] == wanted[1] == wanted[2]
    assert drafted[-1] == drafted[-2]
    assert len(drafted_by.memory._store.buffers) == 1
    assert len(drafted_by.captured_keys()) > 1
    assert captures._backend is drafted_by.drafts._backend
    replays = captures._backend.replays
    taken = drafted_by.memory.new_cache((None,), 0, 8)  # what another thread's call would hold
    assert generate(model, 1, {**config, **CAPTURED}, max_new_tokens=16) == plain
    assert captures._backend.replays == replays
    del taken
    assert generate(model, 1, {**config, **CAPTURED}, max_new_tokens=16) == plain
    assert captures._backend.replays > replays


@pytest.mark.parametrize(
    ("name", "captured"), [("eagle3", {"reads", "drafts"}), ("peagle", {"reads", "drafts"}), ("dflash", {"drafts"})]
)
def test_a_head_is_read_by_graphs_if_the_host_decides_steps(name: str, captured: set[str]) -> None:
    """A processor that reads the text makes the host decide: nothing is launched before the read."""
    model, options = attached(), {"repetition_penalty": 1.3}
    config = {**drafters.BY_NAME[name].add(model), **CAPTURED}
    plain = generate(model, 1, None, **options)
    for _ in range(4):
        assert generate(model, 1, config, **options) == plain
    ((_, drafter),) = model._speculation.compiled[model.drafters[config["method"]]].values()
    graphs_of = drafter.program.graphs
    assert all(getattr(graphs_of, stage).captured_keys() for stage in captured)
    assert not graphs_of.steps.captured_keys()
    if name == "dflash":
        assert {key[-1] for key in graphs_of.drafts.captured_keys()} == {5}, "one size of block, that of training"


STATIC = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 1], [1, 0, 0]]
SMALL_TREE = {"num_draft_tokens": 8, "num_steps": 3, "top_k": 2}
PARALLEL = {"version": 3, "mask_token_id": zoo.VOCAB_SIZE - 1}
LAYER_GROWN: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "dynamic": ({"version": 3}, {"num_draft_tokens": 12, "num_steps": 4, "top_k": 3}, (1, 3)),
    "one level": ({"version": 3}, {"num_draft_tokens": 3, "num_steps": 1, "top_k": 2}, (1,)),
    "static": ({"version": 3}, {"tree": STATIC}, (3,)),
    "a shared lm_head": ({"version": 1}, SMALL_TREE, (1,)),
    "a draft window": ({"version": 3}, {**SMALL_TREE, "draft_window": 8}, (1, 3)),
    "a window": ({"version": 1, "sliding_window": 6}, SMALL_TREE, (3,)),
    "in parallel": ({**PARALLEL, "sliding_window": 9}, {"num_draft_tokens": 12, "num_steps": 4, "top_k": 3}, (1, 3)),
    "in parallel, static": (PARALLEL, {"tree": STATIC}, (3,)),
}
BLOCK_GROWN: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "likeliest nodes": ({}, {"num_draft_tokens": 12}, 0.0),
    "all children": ({"all_children": True, "causal": True}, {"num_draft_tokens": 10, "top_k": 3}, 0.0),
    "static": ({}, {"tree": STATIC}, 0.0),
    "a Markov head": (
        {"markov_rank": 4, "markov_head_type": "rnn", "sample_from_anchor": True, "confidence_head": True},
        {"num_draft_tokens": 8, "top_k": 2}, 0.4,
    ),
    "a transformer over candidates": (drafters.LILICORR, {"num_draft_tokens": 12, "top_k": 3}, 0.0),
    "a GRU": (drafters.DOMINO, {"num_draft_tokens": 8, "top_k": 2}, 0.0),
    "pairs of candidates": (drafters.DFLASH2, {"num_draft_tokens": 12, "top_k": 3}, 0.0),
    "a draft window": ({}, {"num_draft_tokens": 8, "draft_window": 8}, 0.0),
    "windows": (
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        {"num_draft_tokens": 8}, 0.0,
    ),
    "a window from the anchor": (
        {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"], "window_from_anchor": True},
        {"num_draft_tokens": 8}, 0.0,
    ),
}  # fmt: skip
"""Kinds of heads and trees: fields of the head and of the call; rows of a layer, the threshold of a block."""


@pytest.mark.parametrize(
    ("of", "kind", "rows", "masked"),
    [
        *(("eagle", kind, rows, True) for kind, (_, _, sizes) in LAYER_GROWN.items() for rows in sizes),
        *(("eagle", kind, sizes[-1], False) for kind, (_, _, sizes) in LAYER_GROWN.items()),
        *(("dflash", kind, rows, True) for kind in BLOCK_GROWN for rows in (1, 3)),
        *(("dflash", kind, 3, False) for kind in ("a Markov head", "windows", "a window from the anchor")),
    ],
)
def test_a_tree_that_a_graph_grows_is_the_one_that_grows_by_hand(
    of: str, kind: str, rows: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty of them and more, node for node, of changing lengths, paths and memory; rows are padded to one length."""
    monkeypatch.setattr(device_attention, "needs_no_masks", lambda *_: not masked)
    model = attached()
    if of == "eagle":
        of_head, of_call, _ = LAYER_GROWN[kind]
        model.add_drafter(EagleDrafter(drafters.random_head(model, **of_head)))
    else:
        of_head, of_call, threshold = BLOCK_GROWN[kind]
        model.add_drafter(DFlashDrafter(drafters.random_block(model, **of_head), threshold))
    config, drafts, launch = {"method": of, **of_call, **CAPTURED}, [], FeatureSession.launch

    def launched_twice(session: Any, step: Any, budget: Any) -> Any:
        if session._prompt is not None:
            return launch(session, step, budget)
        graphs, cache = session._graphs, session._cache
        before = list(cache.lengths), cache._lengths.clone()
        launch(session, step, budget)
        by_graph, last, grown = session._launched[1], session._last, cache._lengths.clone()
        last = None if last is None else last.clone()
        cache.lengths, cache._lengths = before
        cache.rollback()
        session._graphs = None
        launch(session, step, budget)
        session._graphs, by_hand = graphs, session._launched[1]
        both: list[Any] = [by_graph.tree, by_hand.tree]
        assert torch.equal(*(tree.tokens.raw for tree in both))
        assert torch.equal(*(tree.parents.expand(tree.tokens.shape).raw for tree in both))
        torch.testing.assert_close(by_graph.log_probs.raw, by_hand.log_probs.raw, rtol=1e-4, atol=1e-4)
        if of == "eagle":
            going = (step.acceptance.path >= 0).any(-1).raw
            torch.testing.assert_close(last.raw[going], session._last.raw[going])
        assert torch.equal(grown.raw, cache._lengths.raw)
        assert by_graph.tree.max_depth == by_hand.tree.max_depth
        drafts.append(by_graph)
        return ()

    monkeypatch.setattr(FeatureSession, "launch", launched_twice)
    plain = plain_llama(rows, 24)
    for length in (24, 12, 24):
        found = generate(model, rows, config, max_new_tokens=length)
        assert [row[: 21 + length] for row in plain] == found
    ((_, drafter),) = model._speculation.compiled[model.drafters[of]].values()
    assert len(drafts) >= (50 if of == "eagle" else 40)
    assert drafter.program.graphs.steps.captured_keys()


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_window_reads_nothing_from_the_device(name: str) -> None:
    """Neither its choice in the prompt nor the cuts of the cache, in a padded batch."""
    model = attached()
    config = {**drafters.BY_NAME[name].add(model), **CAPTURED, "draft_window": 8}
    plain = plain_llama(3, 24)
    for _ in range(3):
        reads.clear()
        found = generate(model, 3, config, max_new_tokens=24)
        assert [row[: 21 + 24] for row in plain] == found
        assert not [place for _, place in reads if "drafters/" in place or "window.py" in place]


def test_sampled_answers_are_plain_ones_for_a_seed(kept: tuple[Any, dict[Any, Any]]) -> None:
    model, plain = kept
    for _ in range(3):
        assert generate(model, 1, LOOKUP, **SAMPLED) == plain[1, True]


def test_fifty_steps_of_all_sizes_in_any_order(llama: Any) -> None:
    """Widths, buckets and contents change from call to call, and what a graph leaves behind is destroyed."""
    plain = plain_llama(1, 30)
    for turn in range(10):
        config = {**LOOKUP, "num_draft_tokens": (2, 3, 7, 12, 30)[turn % 5]}
        length = 10 + 4 * (turn % 6)
        assert generate(llama, 1, config, max_new_tokens=length)[0] == plain[0][: 21 + length]
    runner = runner_of(llama)
    assert runner._graphed._backend.replays > 50
    captured = runner.captured_keys()
    assert len({width for _, width, _ in captured}) > 1
    assert len({bucket for _, _, bucket in captured}) > 1


def test_a_second_call_finds_its_memory_and_its_graphs(llama: Any) -> None:
    plain = plain_llama(1)
    for _ in range(5):
        generate(llama, 1, LOOKUP)
    runner = runner_of(llama)
    moves, graphs_made = runner._store.moves, len(runner._graphed._backend.graphs)
    bytes_kept = sum(buffer.keys.nbytes for buffer in runner._store.buffers)
    for _ in range(3):
        assert generate(llama, 1, LOOKUP) == plain
    assert runner._store.moves == moves
    assert len(runner._graphed._backend.graphs) == graphs_made
    assert sum(buffer.keys.nbytes for buffer in runner._store.buffers) == bytes_kept
    operations = {len(graph.tape) for graph in runner._graphed._backend.graphs}
    widths = {width for _, width, _ in runner.captured_keys()}
    # finding the ancestors takes more rounds in wider trees, and nothing else differs
    assert len(operations) <= len(widths)


def test_another_batch_takes_other_memory_and_comes_back(llama: Any) -> None:
    wanted = {rows: plain_llama(rows) for rows in (1, 3)}
    for rows in (1, 3, 1, 3):
        for _ in range(2):
            assert generate(llama, rows, LOOKUP) == wanted[rows]


def test_a_call_beside_another_runs_without_graphs(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    plain = plain_llama(1)
    generate(llama, 1, LOOKUP)
    runner = runner_of(llama)
    facts = llama._speculation.facts[0]
    taken = runner.new_cache(facts.cache_layout, 64, 8)  # what another thread's call would hold
    replays = runner._graphed._backend.replays
    with caplog.at_level(logging.INFO):
        assert generate(llama, 1, LOOKUP) == plain
    assert runner._graphed._backend.replays == replays
    assert any("another call's cache" in record.message for record in caplog.records)
    del taken
    for _ in range(2):
        assert generate(llama, 1, LOOKUP) == plain
    assert runner._graphed._backend.replays > replays


def test_a_cache_of_limited_length_runs_without_graphs(llama: Any) -> None:
    plain = plain_llama(1)
    assert generate(llama, 1, {**LOOKUP, "max_cache_length": 200}) == plain
    assert backend_of(llama).replays == 0


def test_what_cannot_be_captured_is_logged_once_and_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    class ReadsTheHost(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden if bool((hidden.sum() < 1e9).item()) else hidden + 1

    model: Any = move(copy.deepcopy(zoo.build("llama")))
    model.model.norm = nn.Sequential(model.model.norm, ReadsTheHost())
    model = SpeculativeGenerationMixin.attach(model)
    plain = generate(model, 1, None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert generate(model, 1, LOOKUP) == plain
    messages = [record.message for record in caplog.records if "cannot be captured" in record.message]
    assert len(messages) == 1
    assert "_local_scalar_dense waits for the device" in messages[0]
    assert not runner_of(model).captured_keys()


def test_a_replay_that_differs_is_not_used(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimGraphBackend, "capture", lambda _self, _run: lambda: None)  # replays nothing at all
    plain = plain_llama(1)
    for _ in range(3):
        assert generate(llama, 1, LOOKUP) == plain
    assert not runner_of(llama).captured_keys()


@pytest.mark.parametrize(
    ("target", "config"),
    [
        ("llama", LOOKUP),
        ("llama", {"method": "eagle", "num_draft_tokens": 8, "num_steps": 2, "top_k": 2, **CAPTURED}),
        ("qwen3_5_text", LOOKUP),
    ],
)
def test_captures_that_fail_at_random_operations_leave_everything_else_as_it_was(
    target: str, config: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25 times with each method, in fresh shapes: plain answers, and the next shape is captured."""
    monkeypatch.setattr(graphs, "CAPTURE_AFTER", 0)  # every shape is captured at once
    caplog.set_level(logging.INFO)
    model, rng = attached(target), random.Random(config["method"])
    drafters.BY_NAME[config["method"]].add(model)
    plain = {rows: generate(model, rows, None, max_new_tokens=5) for rows in (1, 2)}
    for number in range(25):
        rows = 1 + number % 2
        generate(model, rows, config, max_new_tokens=2)  # makes the graph backend
        backend, captures = backend_of(model), runner_of(model)._graphed
        captures._shapes.clear()
        backend.graphs.clear()
        backend.failures = [(rng.randrange(140), RuntimeError("operation failed due to a previous error"))]
        assert generate(model, rows, config, max_new_tokens=5) == plain[rows]
        assert not backend.failures  # it failed
        assert captures.captured_keys()  # other shapes did not
    assert sum("this is tried again" in record.message for record in caplog.records) == 25


def test_a_shape_without_memory_is_captured_later(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "RETRY_AFTER", 3)
    plain = plain_llama(1)
    generate(llama, 1, LOOKUP, max_new_tokens=2)
    backend_of(llama).failures = [(20, torch.OutOfMemoryError("of the moment"))]
    for _ in range(3):
        assert generate(llama, 1, LOOKUP) == plain
    steps = runner_of(llama)._graphed._shapes.values()
    assert not any(step.failures for step in steps)
    assert all(step.replay for step in steps if step.times > CAPTURE_AFTER)


Results = list[list[float]]


def add_one(graphed: graphs.Graphed, values: Results, before: Callable[[], Any] = lambda: None) -> Results:
    """Values plus one, by a graph of their shape from the third call on."""

    def function(given: Tensor) -> list[Tensor]:
        before()
        return [given + 1]

    given = torch.tensor(values, device="sim")
    (result,) = graphed((len(values), len(values[0])), function, graphs.Input(given))
    assert isinstance(result, SimTensor)
    return result.raw.tolist()


@pytest.mark.parametrize("times", [1, graphs.MAX_FAILURES])
def test_an_invalidated_capture_is_tried_again_twice(times: int, caplog: pytest.LogCaptureFixture) -> None:
    """Other shapes are captured all the same."""
    graphed, disturbances = graphs.Graphed(SimGraphBackend(SIM), "It"), [invalidate] * times

    def disturb() -> None:
        if captures_here() and disturbances:
            disturbances.pop()()

    for number in range(4 * (CAPTURE_AFTER + 1)):
        assert add_one(graphed, [[number, 2]], disturb) == [[number + 1, 3]]
    assert not disturbances
    assert graphed.captured_keys() == ([(1, 2)] if times == 1 else [])
    given_up = [record for record in caplog.records if "This shape runs without a graph" in record.message]
    assert len(given_up) == (times == graphs.MAX_FAILURES)
    for _ in range(CAPTURE_AFTER + 1):
        add_one(graphed, [[1, 2, 3]])
    assert (1, 3) in graphed.captured_keys()


def test_nothing_is_garbage_collected_during_a_capture() -> None:
    graphed, threshold = graphs.Graphed(SimGraphBackend(SIM), "It"), gc.get_threshold()
    gc.callbacks.append(invalidate)
    gc.set_threshold(1)
    try:
        for _ in range(CAPTURE_AFTER + 1):
            add_one(graphed, [[1]], lambda: [[] for _ in range(100)])
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(invalidate)
        gc.set_threshold(*threshold)
    assert graphed.captured_keys() == [(1, 1)]


def test_random_numbers_are_drawn_before_or_after_a_capture() -> None:
    """Up to torch 2.11, the generator of the device belongs to the capture, whichever thread asks."""
    graphed, capturing, drawn = graphs.Graphed(SimGraphBackend(SIM), "It"), threading.Event(), threading.Event()

    def wait() -> None:
        if captures_here():
            capturing.set()
            assert not drawn.wait(0.2)  # the other thread waits for the end

    def sample() -> int:
        scores = torch.zeros(1, 9).to("sim")
        text = Transcript(torch.zeros(1, 1, dtype=torch.long), LogitsProcessorList(), StoppingCriteriaList(),
                          max_length=9, do_sample=True)  # fmt: skip
        draws = text.draws(SIM)
        assert capturing.wait(10)
        for _ in range(2):
            draws.next(scores)
        draws.keep(1)
        drawn.set()
        return len(draws._states)

    with ThreadPoolExecutor(1) as pool:
        sampled = pool.submit(with_device, sample)
        for _ in range(CAPTURE_AFTER + 1):
            add_one(graphed, [[1]], wait)
        assert sampled.result() == 2
    assert graphed.captured_keys() == [(1, 1)]


def with_device(function: Callable[[], Any]) -> Any:
    """Run a function in a thread that can use the device."""
    with Uploads():
        return function()


@pytest.mark.parametrize("ordered", [True, False])
def test_two_threads_on_two_streams_use_graphs_in_turn(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 calls; without the order of streams, they overwrite what the other reads, which the device notes down."""
    backend = SimGraphBackend(SIM)
    if not ordered:
        monkeypatch.setattr(Stream, "wait_event", lambda _stream, _event: None)
    graphed, barrier = graphs.Graphed(backend, "It"), threading.Barrier(2)

    def work(first: int) -> None:
        with use_stream(Stream()):
            barrier.wait()
            for number in range(100):
                values = [[float(first + number), 5.0]] * (1 + number % 2)
                given = torch.tensor(values).to("sim")
                (result,) = graphed((len(values),), lambda given: [given + 1], graphs.Input(given))
                assert isinstance(result, SimTensor)
                assert torch.equal(result.raw, torch.tensor(values) + 1)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(with_device, partial(work, first)) for first in (0, 1000)]:
            done.result()
    assert backend.replays > 150
    assert bool(races) != ordered, races[:3]
    assert len({stream for _, stream in recorded}) == 2  # freed buffers wait for both


@pytest.mark.parametrize("name", ["eagle3", "token_recycling"])
def test_calls_on_two_streams_reuse_memory_in_order(llama: Any, name: str) -> None:
    plain, streams = plain_llama(1), (Stream(), Stream())
    config = {**drafters.BY_NAME[name].add(llama), **CAPTURED}
    for turn in range(6):
        with use_stream(streams[turn % 2]):
            assert generate(llama, 1, config) == plain
    assert backend_of(llama).replays > 0
    assert not races, races[:5]


@pytest.mark.parametrize(
    ("target", "name"), [("llama", "eagle3"), ("llama", "token_recycling"), ("qwen3_5_text", "sometimes")]
)
def test_repeated_runs_of_what_is_captured_change_nothing(
    target: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture runs a function several times: what it writes besides its results must be the same every time."""
    found, run, plain = [], graphs._Shape.run, generate(attached(target), 3, None, max_new_tokens=8)
    for repeats in (1, 3):
        monkeypatch.setattr(graphs._Shape, "run", lambda shape, times=repeats: [run(shape) for _ in range(times)])
        torch.manual_seed(0)
        model = attached(target)
        config = {**drafters.BY_NAME[name].add(model, torch.tensor(plain)[:, 21:]), **CAPTURED}
        for _ in range(3):
            assert generate(model, 3, config, max_new_tokens=8) == plain
            found.append(model.last_speculation.accepted_per_step)
    assert found[:3] == found[3:]


def test_changed_weights_are_captured_again_and_the_rest_goes() -> None:
    model = attached()
    for _ in range(2):
        generate(model, 1, LOOKUP)
    before = weakref.ref(runner_of(model))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))  # graphs read weights in place
    plain = generate(model, 1, None)
    for _ in range(2):
        assert generate(model, 1, LOOKUP) == plain
    assert before() is runner_of(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    plain = generate(model, 1, None)
    for _ in range(2):
        assert generate(model, 1, LOOKUP) == plain
    gc.collect()
    assert before() is None
    after = weakref.ref(runner_of(model))
    SpeculativeGenerationMixin.detach(model)
    gc.collect()
    assert after() is None


def test_all_widths_are_captured_once_three_are(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that varies its widths would otherwise capture amid later answers; others have one or two widths."""
    monkeypatch.setattr(device_attention, "needs_no_masks", lambda *_: True)
    config, captured = eagle3_on(llama), []
    for num_nodes in (6, 6, 12, 24):
        assert generate(llama, 1, {**config, "num_draft_tokens": num_nodes}) == plain_llama(1)
        captured.append({width for _, width in runner_of(llama).captured_keys()})
    assert captured == [{8}, {8}, {8, 16}, set(graphs.CAPTURED_WIDTHS)]


def test_auto_takes_graphs_where_the_device_has_them(llama: Any) -> None:
    plain = plain_llama(1)
    for compile_ in ("auto", "none"):
        assert generate(llama, 1, {"method": "prompt_lookup", "compile": compile_}) == plain
        assert ("cuda_graph" in llama._speculation.programs) == (compile_ == "auto")
        llama._speculation.programs.clear()


def test_merged_drafting_learns_what_graphs_cost(llama: Any) -> None:
    plain = plain_llama(1)
    for _ in range(2):
        assert generate(llama, 1, {"method": "auto", **CAPTURED}) == plain
    runner = runner_of(llama)
    assert runner.captured_keys()
    facts = llama._speculation.facts[0]
    costs = current_costs(llama, facts, rows=1, widest=64, runner=runner)
    assert costs is current_costs(llama, facts, rows=1, widest=64, runner=runner)
    assert costs is not current_costs(llama, facts, rows=1, widest=64)


def test_recycled_tokens_are_learned_by_graphs_also_after_a_reset() -> None:
    model, drafter = attached(), TokenRecyclingDrafter()
    model.add_drafter(drafter)
    plain, config = generate(model, 1, None), {"method": "token_recycling", **CAPTURED}
    for _ in range(3):
        assert generate(model, 1, config) == plain
    ((_, captured),) = model._speculation.compiled[drafter].values()
    assert captured._program.captured_keys()
    learned = drafter.table
    drafter.reset()
    assert drafter.table is captured.table is not learned
    for _ in range(3):
        assert generate(model, 1, config) == plain
    assert bool((drafter.table.keys.raw != -1).any())
    assert captured._program.captured_keys()


def test_of_equal_entries_the_last_is_recycled() -> None:
    """All of it, on a device that writes several values of one place in any order; as on the CPU."""
    draw = torch.Generator().manual_seed(0)
    tokens, previous = torch.randint(4, (2, 12), generator=draw), torch.randint(-1, 3, (2, 12), generator=draw)
    log_probs, ids = -torch.rand(2, 12, 3, generator=draw), torch.randint(20, (2, 12, 3), generator=draw)
    there, here = (RecycledTokens(20, 3, 5, torch.device(device)) for device in ("sim", "cpu"))
    there.write(*(tensor.to("sim") for tensor in (previous, tokens, log_probs, ids, tokens < 3)))
    kept = [place for place, token in enumerate(tokens.flatten().tolist()) if token < 3]
    chosen = [[tensor.flatten().tolist()[place] for place in kept] for tensor in (previous, tokens)]
    here.write_on_host(*chosen, log_probs.flatten(0, 1), ids.flatten(0, 1), kept)
    for name, tensor in here.tensors().items():  # the last entry receives what is not kept
        found = there.tensors()[name]
        assert isinstance(found, SimTensor)
        assert torch.equal(tensor[:-1], found.raw[:-1]), name


@pytest.mark.parametrize(("method", "most_a_step"), [("eagle", 18), ("auto", 32)])
def test_few_operations_are_launched_outside_of_graphs_and_none_with_new_attention_shapes(
    method: str, most_a_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call launches about 200, a step 16 of `eagle` or 27 of `auto`, which takes as many steps as its clock says."""
    monkeypatch.setattr(device_attention, "needs_no_masks", lambda *_: True)
    model, options = attached(), {"max_new_tokens": 60}
    config = drafters.BY_NAME["eagle3"].add(model) | CAPTURED | ({} if method == "eagle" else {"method": method})
    for _ in range(6):
        generate(model, 1, config, **options)
    launches.clear()
    known = set(attention_shapes)
    generate(model, 1, config, **options)
    assert len(launches) <= 300 + most_a_step * model.last_speculation.num_target_forwards
    assert attention_shapes == known


class SkippingClock:
    """The clock of this process, which a capture can set forward."""

    def __init__(self) -> None:
        self._clock, self._skipped = time.perf_counter, 0.0

    def __call__(self) -> float:
        return self._clock() + self._skipped

    def skip(self) -> None:
        self._skipped += 1000.0


def test_a_slow_capture_does_not_count_as_the_cost_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a step nor a query of a head is learned to take the time of a capture."""
    clock, learn, observe = SkippingClock(), QueryStats.learn, StepCosts.observe
    queries, steps = list[float](), list[float]()

    def noting_learn(stats: QueryStats, without: Width, with_it: Width, *others: Any) -> None:
        queries.append(with_it.seconds - without.seconds)
        learn(stats, without, with_it, *others)

    def noting_observe(costs: StepCosts, width: int, seconds: float, *others: Any) -> None:
        steps.append(seconds)
        observe(costs, width, seconds, *others)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(QueryStats, "learn", noting_learn)
    monkeypatch.setattr(StepCosts, "observe", noting_observe)
    model = attached()
    plain = plain_llama(1)
    head = {"head": EagleDrafter(drafters.random_head(model))}
    model.add_drafter(HybridDrafter({**head, "token_recycling": TokenRecyclingDrafter()}), "merged")
    config = {"method": "merged", **CAPTURED}
    generate(model, 1, config, max_new_tokens=2)  # makes the graph backend
    layer = next(iter(model._speculation.compiled[head["head"]].values()))[1].program
    slow = [backend_of(model), layer.graphs.steps._backend, model._speculation.rule._graphed._backend]
    for backend in slow:
        backend.on_capture = clock.skip
    for _ in range(8):
        assert generate(model, 1, config) == plain
    assert sum(len(backend.graphs) for backend in slow) > 3
    assert max(queries, default=0.0) < 100
    assert max(steps) < 100


def test_warmup_leaves_nothing_to_capture(llama: Any) -> None:
    """Neither verification nor the draft layer, behind texts of two buckets; nothing is learned or reported."""
    config = eagle3_on(llama)
    llama.warmup(LOOKUP, prompt_length=20)
    before = pickle.dumps(llama._speculation.state_dict()[0])
    llama.warmup({"method": "auto", "compile": "cuda_graph"}, prompt_length=20)
    assert pickle.dumps(llama._speculation.state_dict()[0]) == before
    llama.warmup(config, prompt_length=20)
    assert llama.last_speculation is None
    made = [kept["cuda_graph"][1] for kept in llama._speculation.compiled.values()]
    layers = [drafter.program.graphs for drafter in made if isinstance(drafter, EagleDrafter)]
    captured = len(backend_of(llama).graphs), [set(layer.captured_keys()) for layer in layers]
    assert layers
    assert all(shapes for shapes in captured[1])
    assert len({bucket for *_, bucket in runner_of(llama).captured_keys()}) >= 2
    assert generate(llama, 1, config, max_new_tokens=14) == plain_llama(1, 14)  # its last step has a rehearsed length
    assert (len(backend_of(llama).graphs), [set(layer.captured_keys()) for layer in layers]) == captured


def test_memory_is_released_when_asked(llama: Any) -> None:
    config = eagle3_on(llama)
    plain = plain_llama(1)
    assert generate(llama, 1, config) == plain
    kept = weakref.ref(runner_of(llama)._store.buffers[0])
    llama.release_memory()
    gc.collect()
    assert kept() is None
    assert not llama._speculation.programs
    assert generate(llama, 1, config) == plain


def eagle3_on(model: Any) -> dict[str, Any]:
    """Put a head on a model; what its graphs are asked for with."""
    row = next(row for row in drafters.ROWS if row.name == "eagle3")
    return {**row.add(model), **CAPTURED}


def test_buckets_are_at_most_half_as_long_again() -> None:
    memory.SHORTEST_BUCKET = 256
    found = [bucket_of(length) for length in range(1, 5000)]
    assert sorted(set(found)) == [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]
    for length, bucket in enumerate(found, start=1):
        assert length <= bucket < max(1.5 * length + 1, 257)
    assert CAPTURE_AFTER == 2


class Quantised(nn.Module):
    """A stand-in for a quantised product: int8 weights with a scale per row, which it widens in every call."""

    def __init__(self, linear: nn.Linear, reads: bool) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(-1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale, self._reads = nn.Parameter(scale, requires_grad=False), reads

    def forward(self, hidden: Tensor) -> Tensor:
        if self._reads and bool((hidden.abs() > 1e6).any()):  # as LLM.int8() looks for outliers
            return hidden @ (self.weight * self.scale).T.double()
        return hidden @ (self.weight.to(hidden.dtype) * self.scale).T


@pytest.mark.parametrize("reads", [False, True])
def test_products_of_any_quantisation_are_captured_if_they_can_be(
    reads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Quantised(getattr(layer.mlp, name), reads))
    model.hf_quantizer = SimpleNamespace(is_compileable=False)
    model = SpeculativeGenerationMixin.attach(move(model))
    plain = generate(model, 1, None)
    assert [generate(model, 1, LOOKUP) for _ in range(3)] == [plain] * 3
    assert bool(runner_of(model).captured_keys()) is not reads
    warned = [record.message for record in caplog.records if "cannot be captured as a graph" in record.message]
    assert len(warned) == reads
    with pytest.raises(CaptureError, match="its quantisation cannot be compiled, according to transformers"):
        model_programs.make_runner(model, current_facts(model), frozenset(), "inductor")


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text", "qwen3_5_text", "falcon_h1", "mamba2"])
@pytest.mark.parametrize("drafter", ["sometimes", "eagle3", "dflash"])
@pytest.mark.parametrize("rows", [1, 3])
def test_graphs_without_masks_serve_all_lengths(
    name: str, drafter: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, sliding and chunked layers; rows of different lengths, padded prompts; as with the kernels of a GPU."""
    if name != "llama" and (drafter == "dflash" or rows == 1):
        pytest.skip("windows, chunks and states are tried with rows of different lengths")
    if name == "mamba2" and drafter == "eagle3":
        pytest.skip("a head needs the sizes of attention")
    used = set[str]()

    def attend(query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, *others: Any) -> Tensor:
        used.add("sliding" if visible.window else "chunked" if visible.chunk else "full")
        return attend_exactly(query, key, value, visible, *others)

    monkeypatch.setattr(device_attention, "needs_no_masks", lambda *_: True)
    monkeypatch.setattr(device_attention, "attend_exactly", attend)
    model, length = attached(name), 40
    plain = generate(model, rows, None, max_new_tokens=length)
    config = {**drafters.BY_NAME[drafter].add(model, torch.tensor(plain)[:, 21:]), **CAPTURED}
    for _ in range(3):
        assert generate(model, rows, config, max_new_tokens=length) == plain
    runner = runner_of(model)
    assert not runner.has_masks
    assert runner._graphed._backend.replays > 20
    assert all(len(key) == 2 for key in runner.captured_keys()), "rows and width alone"
    assert used >= {kind for _, kind, _ in MaskLayout.of(model.config).layers}
    if drafter != "sometimes":
        ((_, captured),) = model._speculation.compiled[model.drafters[config["method"]]].values()
        steps = captured.program.graphs.steps.captured_keys()
        assert steps
        assert len(steps) == len({key[-2:] for key in steps}) * len({key[0] for key in steps}), "one for all lengths"


def test_a_model_that_reads_its_masks_keeps_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_attention, "needs_no_masks", lambda *_: True)
    model: Any = move(zoo.shallow("llama", 2))
    kind = type(model.model.layers[1].self_attn)
    forward = kind.forward

    def with_a_copy(self: Any, *, attention_mask: Any = None, **others: Any) -> Any:
        copied = attention_mask if attention_mask is None or self.layer_idx == 0 else attention_mask.clone()
        return forward(self, attention_mask=copied, **others)

    monkeypatch.setattr(kind, "forward", with_a_copy)
    model = SpeculativeGenerationMixin.attach(model)
    plain = generate(model, 1, None)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert generate(model, 1, LOOKUP) == plain
    assert "attend with masks: without them, checking it against the model failed" in caplog.text
    assert runner_of(model).has_masks
    assert runner_of(model).captured_keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_exact_calls_run_one_graph_in_plain_steps_and_with_drafts(
    name: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that end early stay; prompts are read alike; what other calls have captured or grown does not matter."""
    monkeypatch.setattr(device_attention, "needs_no_masks", lambda *_: True)
    model: Any = attached(name).to(dtype)
    shapes, verify = list[Any](), GraphForward.verify

    def noting(self: Any, inputs: Any, cache: Any, known: int = 0) -> Any:
        shapes.append((inputs.tree.num_nodes, len(inputs.tree.tokens), inputs.width))
        return verify(self, inputs, cache)

    exact, options = {"exact": True}, {"max_new_tokens": 40}
    plain = generate(model, rows, {"method": "plain", **exact}, **options)
    monkeypatch.setattr(model_programs, "_check", lambda *_: None)  # its forwards have other shapes
    monkeypatch.setattr(GraphForward, "verify", noting)
    end = {"eos_token_id": plain[0][21 + 30], "pad_token_id": 0, **options}
    short = generate(model, rows, {"method": "plain", **exact}, **end)
    for row in ("sometimes", "eagle3", "prompt_lookup", "token_recycling", "auto"):
        config = {"method": row}
        if row in drafters.BY_NAME:
            config = drafters.BY_NAME[row].add(model, torch.tensor(plain)[:, 21:])
        for fields in ({}, {"num_draft_tokens": 16}) if row in ("token_recycling", "auto") else ({},):
            del shapes[:]
            assert generate(model, rows, {**config, **exact, **fields}, **options) == plain, row
            assert max(nodes for nodes, *_ in shapes) <= 8
            assert {shape[1:] for shape in shapes} == {(rows, 8)}
            assert runner_of(model).captured_keys() == [(rows, 8, "exact")]
        assert generate(model, rows, {**config, **exact}, **end) == short
    generate(model, rows, "auto", max_new_tokens=150)  # more memory, and other graphs
    assert len(runner_of(model).captured_keys()) >= 1
    assert generate(model, rows, {"method": "plain", **exact}, **options) == plain


@pytest.mark.parametrize("drafter", ["sometimes", "always", "token_recycling"])
def test_the_logits_of_exact_calls_are_those_of_plain_decoding(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_attention, "needs_no_masks", lambda *_: True)
    model: Any = attached().to(torch.bfloat16)
    ids, exact = move_ids(prompts(1)[0]), {"exact": True, "compile": "cuda_graph"}
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(ids, speculative={"method": "plain", **exact}, **options)
    config = drafters.BY_NAME[drafter].add(model, plain.sequences.raw[:, 21:])
    found = model.generate(ids, speculative={**config, **exact}, **options)
    assert found.speculation.mean_accepted_length > 1
    assert all(torch.equal(one.raw, other.raw) for one, other in zip(found.logits, plain.logits, strict=True))


def test_what_graphs_cannot_keep_exact_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": "prompt_lookup", "exact": True}
    with pytest.raises(UnsupportedGenerationError, match="graphs of it attend with masks"):
        generate(llama, 1, config)
    monkeypatch.setattr(device_attention, "needs_no_masks", lambda *_: True)
    llama.release_memory()
    plain = generate(llama, 1, config)
    llama.warmup(config, prompt_length=21)
    for fields, message in (
        ({"max_cache_length": 90}, "or `max_cache_length` replaces"), ({"compile": "inductor"}, "compile='inductor'"),
        ({"compile": "kernels"}, "runs on a CPU"),
    ):  # fmt: skip
        with pytest.raises(SpeculativeDecodingError, match=message):
            generate(llama, 1, {**config, **fields})
    taken = runner_of(llama).new_cache((None,), 0, 8)  # what another thread's call would hold
    with pytest.raises(UnsupportedGenerationError, match="which another call uses"):
        generate(llama, 1, config)
    del taken
    assert generate(llama, 1, config) == plain
