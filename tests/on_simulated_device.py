"""On a second device: the CPU's answers, one host read per step, and pieces of a step that can be captured."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import drafters
import zoo
from hf_specdec import SpeculativeGenerationMixin, UnsupportedGenerationError
from hf_specdec.acceptance.accepted import DeviceAccount, RowEnds
from hf_specdec.acceptance.rules import descend, match_at_once
from hf_specdec.acceptance.transcript import Draws, Transcript
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.checked import CHECKED_STEPS
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.launching import LaunchingSession
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Level, StaticLevels, grow_dynamic, grow_static
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification import tree_attention
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.features import PromptPadding
from hf_specdec.verification.graph_backends import CapturableOnly
from hf_specdec.verification.masks import MaskLayout, committed_slots, tree_masks
from hf_specdec.verification.memory import LayerLayout
from hf_specdec.verification.tree_attention import AttentionContext
from kernel_by_name import by_name, draw, tree_seen
from models import prompts
from simulated_device import SIM, Graph, SimTensor, move, reads, simulation, uploads

READS = (("tolist", "host_sync.py:read"), ("synchronize", "acceptance/accepted.py:finish"))
__all__ = ["by_name"]
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20}


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with simulation():
        yield


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "lfm2"])
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Full attention, sliding windows, chains."""
    return on_both(request.param)


def on_both(name: str) -> tuple[Any, Any]:
    """The same model on the CPU and on the device."""
    with simulation():
        plain, there = copy.deepcopy(zoo.build(name)), move(copy.deepcopy(zoo.build(name)))
        return SpeculativeGenerationMixin.attach(plain), SpeculativeGenerationMixin.attach(there)


def generate(model: Any, batch_size: int, device: str, **options: Any) -> list[list[int]]:
    ids, mask = prompts(batch_size)
    torch.manual_seed(4)
    given = {"max_new_tokens": 14, "do_sample": False, **options}
    output = model.generate(ids.to(device), attention_mask=mask.to(device), **given)
    rows: list[list[int]] = (output.raw if isinstance(output, SimTensor) else output).tolist()
    return rows


@pytest.mark.usefixtures("full_depth")  # on other devices than CPUs, depth does not follow the tokens left
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("row", drafters.ROWS, ids=lambda row: row.name)
def test_the_same_answers_with_one_read_per_step(
    models: tuple[Any, Any], row: drafters.Row, sampling: dict[str, Any], batch_size: int
) -> None:
    """The random numbers of both devices are the CPU's here, so sampled answers are equal, ragged rows included."""
    here, there = models
    if here.config.model_type != "llama" and (batch_size == 1 or row.name not in OF_EVERY_KIND):
        pytest.skip("a second kind of model is tried with some")
    if row.name not in OF_EVERY_KIND and bool(sampling) == (batch_size == 3):
        pytest.skip("greedy answers of a batch and sampled ones of a row are enough for most")
    plain = torch.tensor(generate(here, batch_size, "cpu", **sampling))
    answers = plain[:, 21:]
    ours = generate(here, batch_size, "cpu", speculative=row.add(here, answers), **sampling)
    state = torch.get_rng_state()
    config = row.add(there, answers)
    reads.clear()
    uploads.clear()
    theirs = generate(there, batch_size, "sim", speculative=config, **sampling)
    merged = there.last_speculation.control.get("queries", {})
    if not (merged and sampling and batch_size > 1):  # sources are asked in another way, and ragged rows draw in turns
        assert theirs == ours
        assert torch.equal(state, torch.get_rng_state())
    steps = there.last_speculation.num_target_forwards
    of_steps = [(name, place) for name, place in reads if place not in TRANSFORMERS_READS]
    # one read tells the host the first token of every row; lookup and lookahead read the prompt as well, merged
    # drafting the first roots (its heads' trees come with the steps), and lookahead the choices at its window, after
    # every step that verified one and was not the last
    besides = (row.name in ("prompt_lookup", "lookahead", "hybrid")) + bool(merged)
    oracle = row.knows_answers  # a test's own drafter, which reads its first roots, and whose first drafts are checked
    besides += CHECKED_STEPS * oracle
    windows = sum(map(of_steps.count, READS)) - (steps + 1 + besides)
    assert 0 < windows < steps if row.name == "lookahead" else windows == 0
    assert len(of_steps) == sum(map(of_steps.count, READS)) + oracle, set(of_steps)
    blocking = Counter(place for _, place in uploads if place not in UPLOADED_PER_CALL)
    assert not blocking, blocking
    chains = not there._speculation.facts[0].supports_trees
    assert chains or "verification/chain_target.py:_forward" not in {place for _, place in reads}


@pytest.mark.usefixtures("full_depth")
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_an_assistant_of_gemma4(sampling: dict[str, Any]) -> None:
    test_the_same_answers_with_one_read_per_step(on_both("gemma4_text"), drafters.GEMMA4, sampling, 3)


UPLOADED_PER_CALL = (
    "verification/target.py:prefill", "transformers_private.py:prefill", "verification/features.py:of",
    "verification/masks.py:of", "acceptance/accepted.py:__init__",
    "acceptance/transcript.py:sequences", "generation/mixin.py:generate", "drafters/medusa.py:of",
    "trees/growth.py:of", "trees/growth.py:indices", "elsewhere",
)  # fmt: skip
"""Where the host gives the device something and waits: once per call; steps upload from pinned memory."""

OF_EVERY_KIND = ("sometimes", "token_recycling", "early_exit", "eagle3", "gemma4_assistant")
TRANSFORMERS_READS = (
    "generation/mixin.py:generate", "generation/hooks.py:_sample", "transformers_private.py:prefill",
    "verification/features.py:of", "verification/chain_target.py:_forward", "transformers_private.py:pad_token_id",
)  # fmt: skip
"""Where else the device is read: once per call by transformers' preparation, and to see whether a prompt is padded;
in every forward over a chain with padding, whose masks are transformers' own."""


def test_what_reads_the_text_costs_what_it_costs(models: tuple[Any, Any]) -> None:
    """A processor that looks at the text is asked on the exact prefix, a read per token; the answers are the same."""
    here, there = models
    for sampling in ({}, SAMPLED):
        options = {"speculative": "prompt_lookup", "repetition_penalty": 1.3, **sampling}
        assert generate(here, 1, "cpu", **options) == generate(there, 1, "sim", **options)


def test_outputs_per_token_are_equal(models: tuple[Any, Any]) -> None:
    here, there = models
    ids, mask = prompts(3)
    options = {"max_new_tokens": 8, "do_sample": False, "output_scores": True, "output_hidden_states": True,
               "return_dict_in_generate": True, "speculative": "prompt_lookup"}  # fmt: skip
    ours = here.generate(ids, attention_mask=mask, **options)
    theirs = there.generate(ids.to(SIM), attention_mask=mask.to(SIM), **options)
    assert ours.sequences.tolist() == theirs.sequences.raw.tolist()
    for mine, other in zip(ours.scores, theirs.scores, strict=True):
        torch.testing.assert_close(mine, other.raw)
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(mine[-1], other[-1].raw)


@pytest.mark.parametrize("sample", [False, True])
def test_an_assistant_on_another_device(models: tuple[Any, Any], sample: bool) -> None:
    """What it drafts comes back to the target's device, whichever of the two is which."""
    if sample and models[0].config.model_type != "llama":
        pytest.skip("a second kind of model is tried with a deterministic assistant")
    config = {"method": "far away", "num_steps": 3}
    for batch_size in (1, 3):
        plain = generate(models[0], batch_size, "cpu", max_new_tokens=8)
        for model, device in zip(models, ("cpu", "sim"), strict=True):
            assistant = drafters.noisy("llama", noise=0.1)
            drafter = DraftModelDrafter(move(assistant) if device == "cpu" else assistant, sample=sample)
            model.add_drafter(drafter, "far away")
            assert generate(model, batch_size, device, speculative=config, max_new_tokens=8) == plain
            generate(model, batch_size, device, speculative=config, max_new_tokens=4, **SAMPLED)
            assert model.remove_drafter("far away") is drafter


class RepeatingSession(LaunchingSession):
    """Drafts the root three times more; counts what it hears."""

    def __init__(self, roots: Tensor, heard: list[str]) -> None:
        super().__init__(roots)
        self._heard = heard

    def _follow(self, step: Any) -> None:
        self._heard.append(type(step).__name__)

    def _draft(self, budget: Budget) -> Draft:
        nodes = torch.arange(-1, 3, device=self._roots.device)
        return Draft(TokenTree(self._roots[:, None].expand(-1, 4).clone(), nodes, max_depth=3))


class RepeatingDrafter(Drafter):
    method = "repeating"

    def __init__(self) -> None:
        self.heard: list[str] = []

    def limits(self, config: Any) -> Budget:
        return Budget(4, 3, 1)

    def start(self, target: Any, context: Any, config: Any) -> RepeatingSession:
        return RepeatingSession(context.roots, self.heard)


def test_a_drafter_of_another_package_is_launched_before_the_read(models: tuple[Any, Any]) -> None:
    here, there = models
    drafter = RepeatingDrafter()
    there.add_drafter(drafter)
    assert generate(there, 1, "sim", speculative="repeating") == generate(here, 1, "cpu")
    assert drafter.heard.count("Step") >= len(drafter.heard) - 2  # a plain step at the end is not followed
    there.remove_drafter("repeating")


@pytest.mark.filterwarnings("ignore:You are calling .generate")
def test_a_prompt_on_another_device_is_refused(models: tuple[Any, Any]) -> None:
    here, there = models
    ids, _ = prompts(1)
    for model, device in ((here, "sim"), (there, "cpu")):
        with pytest.raises(UnsupportedGenerationError, match="The prompt is on"):
            model.generate(ids.to(device), max_new_tokens=4, speculative="prompt_lookup")


# ------------------------------------------------------------------------------------------------- capture


def captured(step: Callable[..., Any], first: tuple[Tensor, ...], then: tuple[Tensor, ...]) -> None:
    """Capture a step for some contents, replay it for others: it gives what the step itself gives for those."""
    wanted = step(*(tensor.clone() for tensor in then))
    inputs = [tensor.clone().to(SIM) for tensor in first]
    step(*inputs)  # whatever is made once is made before
    graph = Graph()
    with graph.capture():
        made = step(*inputs)
    for tensor, content in zip(inputs, then, strict=True):
        tensor.copy_(content.to(SIM))
    graph.replay()
    for mine, right in zip(made, wanted, strict=True):
        torch.testing.assert_close(mine.raw, right)


TREES = (
    (torch.tensor([[5, 1, 2, 3], [5, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]])),
    (torch.tensor([[6, 4, 3, 0], [0, 2, 2, 1]]), torch.tensor([[-1, 0, 1, 0], [-1, 0, 0, -1]])),
)


def test_masks_and_positions_can_be_captured() -> None:
    layout = MaskLayout((("full_attention", "full", 0), ("sliding_attention", "sliding", 3)), additive=False)
    valid = torch.tensor([[False, True, True], [True, True, True]])

    def step(tokens: Tensor, parents: Tensor, lengths: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        tree = TokenTree(tokens, parents)
        masks = tree_masks(layout, tree.ancestor_mask(), lengths, 7, PromptPadding.where(valid), torch.float32)
        assert isinstance(masks, dict)
        return (*masks.values(), tree.depths(), committed_slots(lengths, 7, None), tree.first_children().parents)

    captured(step, (*TREES[0], torch.tensor([5, 7]), valid), (*TREES[1], torch.tensor([7, 6]), ~valid))


@pytest.mark.parametrize("rule", [match_at_once, descend])
def test_whole_rules_can_be_captured_but_for_their_read(
    rule: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the read taken out, a rule touches the device alone: the path, the cut at a row's end, the next root."""

    class NothingRead:
        def __init__(self, *tensors: Tensor) -> None:
            self._tensors = tensors

        def finish(self, also: Any = ()) -> list[list[list[int]]]:
            return [[[-1] * tensor.shape[1]] * tensor.shape[0] for tensor in (*self._tensors, *also)]

    monkeypatch.setattr("hf_specdec.acceptance.paths.Transfer", NothingRead)

    def step(tokens: Tensor, parents: Tensor, logits: Tensor, remaining: Tensor) -> tuple[Tensor, ...]:
        text = Transcript(
            torch.zeros(2, 1, dtype=torch.long, device=tokens.device), LogitsProcessorList(),
            StoppingCriteriaList([MaxLengthCriteria(9)]), max_length=9, do_sample=False,
        )  # fmt: skip
        text._account = accounts[str(tokens.device)]
        text._account.remaining = remaining
        acceptance = rule(TokenTree(tokens, parents), logits, text)
        return acceptance.path, acceptance.tokens, acceptance.next_token, text._account.remaining

    accounts = {name: DeviceAccount([8, 8], RowEnds((), 0, False), torch.device(name)) for name in ("cpu", "sim:0")}
    logits = [torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    captured(step, (*TREES[0], logits[0], torch.tensor([8, 8])), (*TREES[1], logits[1], torch.tensor([1, 3])))


def test_commit_can_be_captured() -> None:
    """The moves of all layers, and the lengths on the device."""

    def step(keys: Tensor, path: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        cache = TreeCache([LayerLayout(2, 4, 4, keys.device)], capacity=8)
        cache.update(keys, keys + 1, 0)
        cache.lengths, cache._lengths = [2, 3], lengths
        cache.commit_unread(path)
        return cache.layers[0].keys[:, :, :5].clone(), cache.lengths_on(path.device, 2)

    keys = [torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    first = (keys[0], torch.tensor([[0, 2, -1], [0, 3, -1]]), torch.tensor([2, 3]))
    captured(step, first, (keys[1], torch.tensor([[0, 1, 3], [0, 2, -1]]), torch.tensor([2, 3])))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_growth_can_be_captured(kind: str) -> None:
    """Trees of a table of scores: which tokens follow which."""
    levels = {device: StaticLevels.of(sorted(drafters.CHOICES), torch.device(device)) for device in ("cpu", "sim")}

    def step(roots: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        def children(tokens: Tensor) -> Level:
            best, ids = table[tokens].log_softmax(-1).topk(3)
            return Level(best, best, ids)

        def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
            return children(tokens)

        root = children(roots[:, None])
        if kind == "dynamic":
            draft = grow_dynamic(roots, root, expand, Budget(num_nodes=7, num_steps=3, top_k=3))
        else:
            draft = grow_static(roots, root, expand, levels[roots.device.type])
        assert draft.log_probs is not None
        return draft.tree.tokens, draft.tree.parents.clone(), draft.log_probs

    tables = [torch.randn(9, 9, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    captured(step, (torch.tensor([1, 2]), tables[0]), (torch.tensor([8, 3]), tables[1]))


def test_the_device_refuses_what_an_accelerator_refuses() -> None:
    """The simulation itself: a test on it must be able to fail."""
    there = torch.ones(3, device=SIM)
    with pytest.raises(RuntimeError, match="of sim:0 and of the CPU"):
        there + torch.ones(3)
    reads.clear()
    assert there.sum().item() == 3
    assert there.to("cpu").tolist() == [1, 1, 1]
    assert bool((there > 0).all())
    assert len(reads) == 3
    with Graph().capture(), pytest.raises(RuntimeError, match="while a graph is captured"):
        there.tolist()
    with Graph().capture(), pytest.raises(RuntimeError, match="while a graph is captured"):
        torch.tensor([1], device=SIM)


def test_draws_behind_the_end_are_undone() -> None:
    text = Transcript(torch.zeros(1, 1, dtype=torch.long), LogitsProcessorList(), StoppingCriteriaList(),
                      max_length=9, do_sample=True)  # fmt: skip
    scores = torch.zeros(1, 50)
    torch.manual_seed(0)
    wanted = [int(text.draw(scores)) for _ in range(3)]
    torch.manual_seed(0)
    draws = Draws(text, torch.default_generator)
    drawn = [int(draws.next(scores)) for _ in range(2)]
    draws.keep(1)
    assert [drawn[0], int(text.draw(scores)), int(text.draw(scores))] == wanted


@pytest.mark.parametrize("keys", [300, 1536, 1537])
def test_attention_by_the_named_kernel_can_be_captured_after_one_trial(
    keys: int, by_name: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial waits for the device once; then masks and parts follow from sizes alone."""
    first, then = (
        (draw(1, 4, 6, 8, seed=seed), draw(1, 2, keys, 8, seed=seed + 1), tree_seen(kind, 1, 6, keys))
        for seed, kind in ((0, "full"), (2, "hole"))
    )

    def attend(query: Tensor, cache: Tensor, seen: Tensor) -> Tensor:
        return AttentionContext({"full_attention": seen}).attend("full_attention", query, cache, cache, None)

    buffers = [tensor.to(SIM) for tensor in first]
    attend(*buffers)
    assert reads
    reads.clear()
    with CapturableOnly():
        attend(*buffers)
    graph = Graph()
    with graph.capture():
        found = attend(*buffers)
    for buffer, tensor in zip(buffers, then, strict=True):
        buffer.copy_(tensor.to(SIM))
    graph.replay()
    assert not reads
    monkeypatch.setattr(tree_attention, "calls_kernel_directly", lambda _device: False)
    assert isinstance(found, SimTensor)
    torch.testing.assert_close(found.raw, attend(*then), atol=1e-5, rtol=0)
