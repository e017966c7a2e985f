"""Trees on recurrent targets: the mathematics node by node, and whole models at every node, step and seam."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, GenerationConfig

import drafters
import zoo
from hf_specdec import SpeculativeGenerationMixin, UnsupportedGenerationError, UnsupportedModelError
from hf_specdec.cpu import library, operations
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.chain_target import ChainTarget
from hf_specdec.verification.model import CACHE_FIELD, cache_argument
from hf_specdec.verification.probe import inspect_target
from hf_specdec.verification.recurrence import FORMS, Branches, Updates, advance, advance_window, convolve
from hf_specdec.verification.recurrent_layer import REPLACEMENTS, RecurrentState, recurrent_layers
from hf_specdec.verification.tree_target import TreeTarget
from hf_specdec.verification.trials import first_inputs
from reference import path_to_root

ROWS = 3
HEADS, GROUPS, KEYS, VALUES = 4, 2, 8, 6
"""Value heads, key heads, and their channels."""
SHAPES = {"wide": 0.3, "deep": 0.95, "chain": 1.0}
"""How often a node's parent is the node before it."""


def random_parents(size: int, rows: int, follows: float, generator: torch.Generator) -> Tensor:
    """Parents `[rows, size]`, most of them among the six nodes before; some nodes are further roots, as padding is."""
    parents = torch.full((rows, size), -1)
    for row, node in itertools.product(range(rows), range(1, size)):
        draw = float(torch.rand((), generator=generator))
        back = 1 if draw < follows else int(torch.randint(1, 8, (), generator=generator))
        parents[row, node] = max(node - back, -1)
    return parents


class Case:
    """Random inputs of one kind of recurrence, in the dtypes of transformers' functions, and its committed state."""

    def __init__(self, kind: str, size: int, strength: float, repeats: bool, generator: torch.Generator) -> None:
        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator)

        def tokens(*sizes: int) -> Tensor:  # dimension 1 counts tokens
            return draw(sizes[0], 1, *sizes[2:]).expand(*sizes) if repeats else draw(*sizes)

        self.form, self.flag, self.size = FORMS["delta_rule" if kind == "kda" else kind], True, size
        if kind in ("delta_rule", "kda"):
            groups = HEADS if kind == "kda" else GROUPS
            query, key = (tokens(ROWS, size, groups, KEYS) for _ in range(2))
            value, beta = draw(ROWS, size, HEADS, VALUES), tokens(ROWS, size, HEADS).mul(3).sigmoid()
            shape = (ROWS, size, HEADS, KEYS) if kind == "kda" else (ROWS, size, HEADS)
            decay = -strength * torch.rand(shape, generator=generator)
            self.inputs: list[Tensor | None] = [query, key, value, decay, beta]
            self.by_token = [1] * 5
            self.state = draw(ROWS, HEADS, KEYS, VALUES)
        elif kind == "mamba2":
            rate = -strength * torch.rand(HEADS, generator=generator)
            key, query = tokens(ROWS, size, GROUPS, KEYS), draw(ROWS, size, GROUPS, KEYS)
            x, dt = draw(ROWS, size, HEADS, VALUES), tokens(ROWS, size, HEADS)
            self.inputs = [x, dt, rate, key, query, draw(HEADS), draw(HEADS)]
            self.by_token = [1, 1, 0, 1, 1, 0, 0]
            self.state = draw(ROWS, HEADS, KEYS, VALUES)
        else:
            rate = -strength * torch.rand(HEADS, KEYS, generator=generator)
            x, dt, gate = (draw(ROWS, HEADS, size) for _ in range(3))
            b, c = (draw(ROWS, KEYS, size) for _ in range(2))
            self.inputs = [x, dt, rate, b, c, draw(HEADS), gate, draw(HEADS)]
            self.by_token = [2, 2, 0, 2, 2, 0, 2, 0]
            self.state = draw(ROWS, HEADS, KEYS, 1)
        self.kind = kind

    def run(self, parents: Tensor, begin: int = 0, end: int | None = None, known: Updates | None = None) -> Any:
        """What the form returns for nodes `begin` to `end`, with outputs `[B, n, ...]`, and the updates."""
        end = self.size if end is None else end
        parts = [
            part if dim == 0 or part is None else part.narrow(dim, begin, end - begin)
            for part, dim in zip(self.inputs, self.by_token, strict=True)
        ]
        tree = TokenTree(torch.zeros(ROWS, end, dtype=torch.long), parents[:, :end])
        output, updates = self.form(parts, self.flag, self.state, Branches.of(tree, begin), known)
        return (output.movedim(-1, 1) if self.kind == "mamba1" else output), updates

    def by_definition(self, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[B, n, ...]` and states `[B, n, ...]` of all nodes, one after the other in float64."""
        inputs = [None if part is None else part.double() for part in self.inputs]
        outputs: list[list[Tensor]] = []
        states: list[list[Tensor]] = []
        for row in range(ROWS):
            outputs.append([])
            states.append([])
            for node, parent in enumerate(parents[row % len(parents)].tolist()):
                before = self.state[row].double() if parent < 0 else states[row][parent]
                state, output = getattr(self, f"_{self.kind}")(inputs, row, node, before)
                states[row].append(state)
                outputs[row].append(output)
        return torch.stack([torch.stack(row) for row in outputs]), torch.stack([torch.stack(row) for row in states])

    def _delta_rule(self, inputs: Any, row: int, node: int, state: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, decay, beta = (part[row, node] for part in inputs)
        query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
        query, key = (part.repeat_interleave(HEADS // len(part), 0) for part in (query, key))
        state = state * decay.exp().view(HEADS, -1, 1)
        update = beta[:, None] * (value - torch.einsum("hk,hkv->hv", key, state))
        state = state + key[:, :, None] * update[:, None]
        return state, torch.einsum("hk,hkv->hv", query, state) * KEYS**-0.5

    _kda = _delta_rule

    def _mamba2(self, inputs: Any, row: int, node: int, state: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, rate, key, query, skip, bias = (
            part[row, node] if dim else part for part, dim in zip(inputs, self.by_token, strict=True)
        )
        dt = softplus(dt + bias)
        key, query = (part.repeat_interleave(HEADS // GROUPS, 0) for part in (key, query))
        state = state * (dt * rate).exp()[:, None, None] + key[:, :, None] * (dt[:, None] * x)[:, None]
        return state, torch.einsum("hk,hkv->hv", query, state) + skip[:, None] * x

    def _mamba1(self, inputs: Any, row: int, node: int, state: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, rate, key, query, skip, gate, bias = (
            part[row, ..., node] if dim else part for part, dim in zip(inputs, self.by_token, strict=True)
        )
        dt = softplus(dt + bias)
        state = state * (dt[:, None] * rate).exp()[..., None] + (dt * x)[:, None, None] * key[:, None]
        return state, ((state[..., 0] @ query) + skip * x) * silu(gate)


def close(actual: Tensor, expected: Tensor, at_most: float = 2e-6) -> None:
    """Assert that a float32 tensor is close to a float64 one, relative to its largest number."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error = float((actual.double() - expected).abs().max() / expected.abs().max())
    assert error < at_most, error


def random_paths(parents: Tensor, generator: torch.Generator, without: int = 0) -> list[list[int]]:
    """A path of each row, of any length; one row has none."""
    found = list[list[int]]()
    for row in range(ROWS):
        whole = path_to_root(parents[row % len(parents)].tolist(), max(parents.shape[1] - 1 - row, 0))
        found.append(whole[: 1 + int(torch.randint(len(whole), (), generator=generator))] if row != without else [])
    return found


def padded(paths: list[list[int]], more: int = 0) -> Tensor:
    width = max(map(len, paths)) + more
    return torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths])


KINDS = ("delta_rule", "kda", "mamba2", "mamba1")
STRENGTHS = {"weak": 0.02, "strong": 2.0, "extreme": 40.0, "vanishing": 3000.0}


@pytest.mark.parametrize("repeats", [False, True], ids=["random keys", "one token repeated"])
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_continues_its_parents_state(kind: str, shape: str, strength: str, repeats: bool) -> None:
    """At once and in pieces; then a commit of a path of any length in each row, with a path of none."""
    generator = torch.Generator().manual_seed(len(kind) + len(shape) + len(strength))
    for size, rows in ((49, 1), (33, ROWS), (6, ROWS), (1, 1)):
        case = Case(kind, size, STRENGTHS[strength], repeats, generator)
        parents = random_parents(size, rows, SHAPES[shape], generator)
        expected, states = case.by_definition(parents)
        output, updates = case.run(parents)
        close(output, expected)
        pieces, known = list[Tensor](), None
        for begin, end in itertools.pairwise(sorted({0, min(1, size), size // 3, size - 1, size})):
            piece, known = case.run(parents, begin, end, known)
            pieces.append(piece)
        close(torch.cat(pieces, 1), expected)
        if size == 1:
            continue
        assert known is not None
        paths = random_paths(parents, generator)
        for found in (updates, known, updates.first(ROWS, max(map(max, paths[1:])) + 1)):
            after = advance(case.state, found, padded(paths, more=2))
            assert torch.equal(after[0], case.state[0])
            for row in range(1, ROWS):
                close(after[row], states[row, paths[row][-1]])


@pytest.mark.parametrize("held", [0, -1], ids=["K inputs", "K - 1 inputs"])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_convolution_sees_a_nodes_own_ancestors(shape: str, size: int, held: int) -> None:
    generator = torch.Generator().manual_seed(size)
    channels = 5
    for number, rows in ((40, 1), (17, ROWS), (1, ROWS)):
        state = torch.randn(ROWS, channels, size + held, generator=generator)
        inputs, weight = (torch.randn(*sizes, generator=generator)
                          for sizes in ((ROWS, channels, number), (channels, size)))  # fmt: skip
        parents = random_parents(number, rows, SHAPES[shape], generator)
        tree = TokenTree(torch.zeros(ROWS, number, dtype=torch.long), parents)
        bias, known = torch.randn(channels, generator=generator), number // 2
        for some, activation in ((bias, "silu"), (None, None)):
            found = convolve(inputs, state, weight, some, activation, Branches.of(tree))
            later = convolve(inputs, state, weight, some, activation, Branches.of(tree, known))
            texts = [
                torch.cat([state[row], inputs[row][:, path_to_root(parents[row % rows].tolist(), node)]], -1)[
                    :, -size:
                ]
                for row in range(ROWS)
                for node in range(number)
            ]
            expected = (torch.stack(texts).double() * weight).sum(-1).view(ROWS, number, channels).transpose(1, 2)
            expected = expected if some is None else silu(expected + some[:, None])
            close(found, expected)
            close(later, expected[..., known:])
        if number > 1:
            paths = random_paths(parents, generator)
            after = advance_window(state, inputs, padded(paths, more=1))
            for row, path in enumerate(paths):
                assert torch.equal(after[row], torch.cat([state[row], inputs[row][:, path]], -1)[:, -(size + held) :])


def execute(how: str, patch: pytest.MonkeyPatch) -> None:
    """Let recurrent layers compute by torch, by the CPU kernels, or in turns by each of them."""
    library.load_library()
    count = itertools.count()
    for name in ("can_recur", "can_convolve"):
        can = getattr(operations, name)

        def decide(*args: Any, can: Any = can) -> bool:
            return bool(how != "torch" and can(*args) and (how == "kernels" or next(count) % 2))

        patch.setattr(operations, name, decide)


@pytest.mark.parametrize("how", ["torch", "kernels", "in turns"])
@pytest.mark.parametrize("kept", [False, True], ids=["memory of a call", "kept memory"])
@pytest.mark.parametrize("repeats", [False, True], ids=["random keys", "one token repeated"])
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_goes_on_from_accepted_paths(
    kind: str, strength: str, repeats: bool, kept: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of none, some and many nodes are entered by the next forward, or on demand; then a row leaves."""
    execute(how, monkeypatch)
    generator = torch.Generator().manual_seed(len(kind) + len(strength))
    layer, form = RecurrentState(1, (lambda rows: rows + 1) if kept else None), "delta_rule" if kind == "kda" else kind
    exact = rate = None
    steps = (12, 1, "wide"), (70, ROWS, "deep"), (1, 1, "wide"), (9, ROWS, "wide")
    for step, (size, rows, shape) in enumerate(steps):
        case = Case(kind, size, STRENGTHS[strength], repeats, generator)
        if form == "mamba1":
            rate = case.inputs[2] = case.inputs[2] if rate is None else rate  # a weight
        if exact is None:
            exact = case.state.double()
            held = case.state.transpose(-1, -2) if kind == "mamba2" else case.state
            held = held[..., 0] if kind == "mamba1" else held
            layer.states[0] = layer.place("state", held.contiguous(), *held.shape[1:])
            layer.states[0].copy_(held)
            layer.windows[0] = layer.place("window", held, 1, 3)
        case.state = exact
        parents = random_parents(size, rows, SHAPES[shape], generator)
        expected, states = case.by_definition(parents)
        tree = TokenTree(torch.zeros(ROWS, size, dtype=torch.long), parents)
        output = layer.recur(0, form, case.inputs, case.flag, Branches.of(tree))
        layer.forget_path()
        close(output.movedim(-1, 1) if kind == "mamba1" else output, expected, 4e-6)
        paths = random_paths(parents, generator, without=step % 2)
        layer.commit(padded(paths))
        exact = torch.stack([states[row, path[-1]] if path else exact[row] for row, path in enumerate(paths)])
        if step == 2:
            layer.flush()
            close(layer._state_of(0, form).float(), exact, 4e-6)
    layer.keep_rows([0, 2])
    close(layer._state_of(0, form).float(), exact[[0, 2]], 4e-6)


# ----------------------------------------------------------------------------------------------- whole models

FAST = ("qwen3_next", "qwen3_5_text", "kimi_linear", "mamba2", "falcon_h1", "lfm2", "jamba", "zamba")
"""One architecture for each kind of recurrence and of cache layer."""
TREES = (*FAST, "bailing_hybrid", "bamba", "falcon_mamba", "granitemoehybrid", "lfm2_moe", "lfm3", "mamba",
         "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "zamba2", "lara_mini")  # fmt: skip
PURE = ("falcon_mamba", "mamba", "mamba2")
"""Without keys and values, so that the cache counts no tokens."""
CHAINS = ("inkling_text", "inkling2_text", "inkling2_loop_text", "qwen4_exp_text", "zaya")
REFUSED = ("minimax", "recurrent_gemma", "rwkv")
GROUPED: dict[str, dict[str, Any]] = {
    **{name: {"mamba_n_groups": 2} for name in ("bamba", "granitemoehybrid", "falcon_h1")},
    **{name: {"n_groups": 2} for name in ("mamba2", "nemotron_h")},
    "zamba2": {"mamba_ngroups": 2},
}
"""Several heads for each group of keys."""


def by_speed(names: tuple[str, ...]) -> list[Any]:
    """The fast ones in every run, the others in whole ones; those that this version of transformers has."""
    known = [name for name in names if name in CONFIG_MAPPING]
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in known]


def grouped(name: str) -> Any:
    """A tiny model whose heads share keys, if its architecture can."""
    if name not in GROUPED:
        return zoo.build(name)
    torch.manual_seed(0)
    return zoo.decisive(AutoModelForCausalLM.from_config(zoo.config_of(name, GROUPED[name])).eval())


@torch.no_grad()
def from_scratch(model: Any, texts: list[Tensor]) -> Tensor:
    """Logits `[T, V]` after each text, read from its beginning without padding and without a cache."""
    found = dict[tuple[int, ...], Tensor]()
    for _, group in itertools.groupby(sorted((tuple(text.tolist()) for text in texts), key=len), key=len):
        some = sorted(set(group))
        logits = model(input_ids=torch.tensor(some), use_cache=False).logits[:, -1]
        found.update(zip(some, logits, strict=True))
    return torch.stack([found[tuple(text.tolist())] for text in texts])


@pytest.mark.parametrize("rows", [1, ROWS], ids=["one row", "padded rows with own trees"])
@pytest.mark.parametrize("name", by_speed(TREES))
@torch.no_grad()
def test_logits_at_every_node_are_those_of_its_text(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over steps with commits of none, some and many nodes in each row, of which one then leaves the batch."""
    execute("torch" if rows == 1 else "kernels", monkeypatch)
    model, generator = grouped(name), torch.Generator().manual_seed(len(name) + rows)
    facts = inspect_target(model)
    assert facts.supports_trees, facts.chain_only_reason
    prompt = torch.randint(3, zoo.VOCAB_SIZE, (rows, 13), generator=generator)
    mask = torch.ones_like(prompt)
    for row, padding in enumerate((0, 3, 7)[:rows]):
        prompt[row, :padding] = mask[row, :padding] = 0
    target: Any = facts.new_target(model, 160, None)
    target.prefill(prompt, GenerationConfig(), first_inputs(model, mask, target.cache))
    texts = [prompt[row][mask[row] == 1] for row in range(rows)]
    active = list(range(rows))
    for step, (size, shape) in enumerate(((12, "wide"), (17, "chain"), (1, "wide"), (12, "deep"), (9, "wide"))):
        parents = random_parents(size, rows, SHAPES[shape], generator)
        tokens = torch.randint(3, zoo.VOCAB_SIZE, (rows, size), generator=generator)
        logits = target.verify(TokenTree(tokens, parents)).logits
        paths = list[list[int]]()
        for row in range(rows):
            own = [path_to_root(parents[row].tolist(), node) for node in range(size)]
            if row in active:
                expected = from_scratch(model, [torch.cat([texts[row], tokens[row, path]]) for path in own])
                distance = (logits[row] - expected).norm(dim=-1) / expected.norm(dim=-1)
                assert float(distance.max()) < 1e-4, (step, row, distance)
                spread = (expected - expected.mean(0)).norm(dim=-1) / expected.norm(dim=-1)
                assert size == 1 or float(spread.mean()) > 0.1  # a wrong parent would show
            kept = own[-1][: (step + row + len(own[-1])) % (len(own[-1]) + 1)] if row in active else []
            kept = own[-1] if step == 1 and row != 1 else kept  # longer than any convolution
            texts[row] = torch.cat([texts[row], tokens[row, kept]])
            paths.append(kept)
        target.cache.commit([paths[row] for row in active])
        if step == 2 and rows > 1:
            active = [0, 2]
            target.keep_rows(active)


# ----------------------------------------------------------------------------------------------- whole answers

LEFT = (0, 4, 9)
"""Padding of the rows of a batch."""


def batch(rows: int, seed: int = 0) -> tuple[Tensor, dict[str, Any]]:
    """Prompts of 14 tokens with left padding, and the options of a greedy answer."""
    ids = torch.randint(3, zoo.VOCAB_SIZE, (rows, 14), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, padding in enumerate(LEFT[:rows]):
        ids[row, :padding] = mask[row, :padding] = 0
    return ids, {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_speed(TREES))
def test_one_forward_for_each_step_and_rows_at_their_own_pace(name: str, attach: Any) -> None:
    """Rows that end leave the batch; what they are told to draft is verified by nobody."""
    model, (ids, options) = attach(name), batch(ROWS)
    endless, shapes = model.generate(ids, **options), list[tuple[int, ...]]()
    ending = {**options, "eos_token_id": [int(endless[1, 14 + 6]), int(endless[2, 14 + 15])]}
    handle = model.register_forward_pre_hook(
        lambda _module, _inputs, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    model.generate(ids, speculative="prompt_lookup", **options)  # a hook is a reason to probe again
    for pattern, pace, some in (
        ("sometimes", 1.5, options), ("sometimes", 1.0, ending), ("always", 2.0, ending), ("never", 1.0, ending),
    ):  # fmt: skip
        plain = model.generate(ids, **some)
        config = drafters.BY_NAME[pattern].add(model, plain[:, 14:])
        shapes.clear()
        assert torch.equal(plain, model.generate(ids, speculative={**config, "compile": "none"}, **some))
        stats = model.last_speculation
        rows = [shape[0] for shape in shapes]
        assert len(rows) == stats.num_target_forwards + 1
        assert rows[0] == ROWS
        assert rows == sorted(rows, reverse=True)
        assert stats.mean_accepted_length >= pace
        if some is options:
            assert any(len(set(step)) > 1 for step in zip(*stats.accepted_per_step, strict=False))
        else:
            assert rows[-1] < ROWS or len(rows) < 5
    handle.remove()


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("name", by_speed(tuple(name for name in TREES if name not in PURE)))
def test_caches_go_in_and_out_with_the_states_of_plain_decoding(name: str, rows: int, attach: Any) -> None:
    """Three turns: by plain decoding, ours, plain decoding, against three by plain decoding."""
    model, (ids, options) = attach(name), batch(rows)
    options |= {"return_dict_in_generate": True, "max_new_tokens": 9}
    more = torch.randint(3, zoo.VOCAB_SIZE, (rows, 3), generator=torch.Generator().manual_seed(1))
    caches, texts = [None, None], [ids, ids]
    for turn in range(3):
        width = texts[0].shape[1]
        options["attention_mask"] = torch.cat(
            [batch(rows)[1]["attention_mask"], torch.ones(rows, width - 14, dtype=torch.long)], -1
        )
        for side in range(2):
            config = None
            if turn == 1 and side == 1:
                wanted = texts[0][:, width:]
                config = {**drafters.BY_NAME["sometimes"].add(model, wanted), "compile": "none"}
            given = {} if caches[side] is None else {CACHE_FIELD: caches[side]}
            output = model.generate(texts[side][:, :width], speculative=config, **given, **options)
            assert turn == 0 or output[CACHE_FIELD] is caches[side]
            caches[side], texts[side] = output[CACHE_FIELD], output.sequences
        assert torch.equal(*texts)
        length = caches[0].get_seq_length()
        assert caches[1].get_seq_length() == length == width + 8
        for one, two in zip(caches[0].layers, caches[1].layers, strict=True):
            assert type(one) is type(two)
            for part in ("keys", "values", "conv_states", "recurrent_states", "has_previous_state"):
                left, right = getattr(one, part, None), getattr(two, part, None)
                torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-5)
        texts = [torch.cat([text, more], -1) for text in texts]
    assert model.last_speculation.mean_accepted_length > 1


@torch.no_grad()
def filled(name: str = "qwen3_next", rows: int = 2, **changes: Any) -> DynamicCache:
    """A cache of the first six tokens, of a tiny model with other sizes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(zoo.config_of(name, changes)).eval()
    cache = DynamicCache(config=model.config)
    model(input_ids=batch(1)[0][:, :6].expand(rows, -1), use_cache=True, **{cache_argument(model): cache})
    return cache


def recording() -> DynamicCache:
    cache = filled()
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = True
    return cache


@pytest.mark.parametrize(
    ("target", "make", "expected"),
    [
        ("mamba2", lambda: filled("mamba2"), "recurrent states alone, which does not count its tokens"),
        ("qwen3_next", lambda: filled(linear_value_head_dim=4), "has states of .* in layer 0, the model of"),
        ("qwen3_next", lambda: filled(layer_types=["full_attention"] * 4), "states in 0 layers, the model in 2"),
        ("qwen3_next", lambda: filled("lfm2"), "has states of"),
        ("qwen3_next", lambda: filled(rows=1), "has 1 rows, the prompt has 2"),
        ("qwen3_next", recording, "records states of earlier tokens"),
    ],
)  # fmt: skip
def test_a_cache_that_does_not_fit_is_refused_before_any_work(
    target: str, make: Callable[[], Any], expected: str, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (ids, options) = attach(target), batch(2)
    model.generate(ids, speculative="prompt_lookup", **options)
    monkeypatch.setattr(TreeTarget, "prefill", None)
    with pytest.raises(UnsupportedGenerationError, match=expected):
        model.generate(ids, speculative="prompt_lookup", **{cache_argument(model): make()}, **options)


# ----------------------------------------------------------------------------------------------- replaced functions


def functions_of(model: Any) -> dict[str, Any]:
    """The functions that trees replace, of the file that defines a model."""
    space = vars(sys.modules[type(model).__module__])
    return {name: space[name] for name in REPLACEMENTS if name in space}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "jamba"])
def test_another_thread_decodes_plainly_in_the_meantime(name: str, attach: Any) -> None:
    """In every forward over a tree, at the first layer, with the functions replaced."""
    model, other, (ids, options) = attach(name), copy.deepcopy(zoo.build(name)), batch(2)
    before, wanted = functions_of(model), other.generate(ids, **options)
    answers, inside = list[Tensor](), list[bool]()

    def decode(*_: Any) -> None:
        inside.append(functions_of(model) != before)
        thread = threading.Thread(target=lambda: answers.append(other.generate(ids, **options)))
        thread.start()
        thread.join()

    config = drafters.BY_NAME["sometimes"].add(model, wanted[:, 14:])
    next(model.base_model.children()).register_forward_hook(decode)
    found = model.generate(ids, speculative={**config, "compile": "none"}, **options)
    next(model.base_model.children())._forward_hooks.clear()
    assert torch.equal(found, wanted)
    assert sum(inside) >= model.last_speculation.num_target_forwards
    assert len(answers) == len(inside)
    assert all(torch.equal(answer, wanted) for answer in answers)
    assert functions_of(model) == before


@pytest.mark.slow
def test_threads_that_verify_at_the_same_time() -> None:
    models: list[Any] = [SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("qwen3_next"))) for _ in range(3)]
    ids, options = batch(2)
    before, wanted = functions_of(models[0]), models[0].generate(ids, **options)
    answers = dict[tuple[int, int], Tensor]()

    def decode(which: int) -> None:
        for time in range(3):
            config = drafters.BY_NAME["sometimes"].add(models[which], wanted[:, 14:], seed=which)
            limits = {**options, "max_new_tokens": 24 - which - time}
            answers[which, time] = models[which].generate(ids, speculative=config, **limits)

    threads = [threading.Thread(target=decode, args=[which]) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 9
    for (which, time), answer in answers.items():
        assert torch.equal(answer, wanted[:, : 14 + 24 - which - time])
    assert functions_of(models[0]) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_functions_are_as_before_after_an_error(error: type[BaseException], attach: Any) -> None:
    model, (ids, options) = attach("qwen3_5_text"), batch(2)
    before, wanted = functions_of(model), model.generate(ids, **options)
    config = drafters.BY_NAME["always"].add(model, wanted[:, 14:])
    assert torch.equal(wanted, model.generate(ids, speculative=config, **options))
    forwards = [-100]

    def fail(*_: Any) -> None:
        if functions_of(model) != before:
            forwards[0] += 1
        if forwards[0] == 2:
            raise error("in the second forward over a tree, after the first layers")

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    config["compile"] = "none"
    assert torch.equal(wanted, model.generate(ids, speculative=config, **options))
    forwards[0] = 0
    with pytest.raises(error, match="second forward"):
        model.generate(ids, speculative=config, **options)
    handle.remove()
    assert functions_of(model) == before
    assert torch.equal(wanted, model.generate(ids, speculative=config, **options))
    assert torch.equal(wanted, model.generate(ids, **options))


# ----------------------------------------------------------------------------------------------- drafters and others

METHODS = ("early_exit", "draft_model", "dflash", "dspark", "dflash2", "lilicorr", "eagle3", "medusa", "pard", "mtp",
           "hybrid", "lookahead", "domino")  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3_5_text", pytest.param("nemotron_h", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", [*METHODS, "auto"])
def test_trees_of_every_drafter(method: str, name: str, attach: Any) -> None:
    model, (ids, options) = attach(name), batch(ROWS)
    plain = model.generate(ids, **options)
    row = drafters.BY_NAME.get(method, drafters.Row("auto", "auto"))
    fields = {} if method in ("auto", "lookahead", "early_exit") else {"num_draft_tokens": 8}
    config = {**row.add(model), **fields, "trace": True}
    assert torch.equal(plain, model.generate(ids, speculative=config, **options))
    assert not model._speculation.facts[0].chain_only_reason
    sampled = {**options, "do_sample": True, "temperature": 0.7, "max_new_tokens": 12, "attention_mask": None}
    answers = list[Tensor]()
    for speculative in (None, config):
        torch.manual_seed(3)
        answers.append(model.generate(ids[:1], speculative=speculative, **sampled))
    assert torch.equal(*answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "assistant", by_speed(("qwen3_5_text", "mamba2", "lfm2", "jamba", "kimi_linear", "falcon_h1"))
)
def test_assistants_with_recurrent_layers_draft_trees(assistant: str, attach: Any) -> None:
    """One that says what the target says drafts its answer; no step copies the states of the assistant."""
    model, (ids, options) = attach(assistant), batch(ROWS)
    plain = model.generate(ids, **options)
    for noise in (0.0, 0.2):
        model.add_drafter(DraftModelDrafter(drafters.noisy(assistant, noise=noise)))
        for fields in ({"top_k": 3, "num_steps": 4, "num_draft_tokens": 12}, {"top_k": 1, "num_steps": 3}):
            config = {"method": "draft_model", "trace": True, **fields}
            assert torch.equal(plain, model.generate(ids, speculative=config, **options))
            tau = model.last_speculation.mean_accepted_length
            assert tau > (1 if noise else 2 if fields["top_k"] > 1 else 3), (noise, fields, tau)


@pytest.mark.slow
def test_every_architecture_with_recurrent_layers_has_an_outcome() -> None:
    found = set()
    for name in zoo.NAMES:
        try:
            config = zoo.config_of(name).get_text_config(decoder=True)
            found |= {name} if recurrent_layers(config) else set()
        except (KeyError, ValueError):  # not in this version of transformers
            continue
    assert found <= {*TREES, *CHAINS, *REFUSED}


@pytest.mark.parametrize("name", by_speed((*CHAINS, *REFUSED)))
def test_what_is_no_tree_is_a_chain_or_refused_with_its_reason(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(UnsupportedModelError, match=r"cannot verify|cache that could be rolled back"):
            inspect_target(zoo.build(name))
        return
    facts = inspect_target(zoo.build(name))
    assert not facts.supports_trees
    assert facts.chain_only_reason
    assert isinstance(facts.new_target(zoo.build(name), 16, None), ChainTarget)
