"""Token recycling: the table against a dictionary, trees of known tokens only, a history that changes speed alone."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from hf_specdec import CheckpointFormatError, InvalidConfigError, SpeculativeGenerationMixin
from hf_specdec.control.controller import FixedController
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.token_recycling import (
    RecycledTokens,
    TokenRecyclingDrafter,
    _HostRecyclingSession,
    _RecycledCandidates,
    _RecyclingSession,
    learn,
    learn_on_host,
)
from hf_specdec.generation import call
from hf_specdec.trees.draft import PLAIN_STEP, Budget, Draft
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.step import Step
from models import prompts
from reference import Recorder

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
CHAIN = {"method": "token_recycling", "num_draft_tokens": 8, "num_steps": 7, "top_k": 1}


def test_the_table_equals_a_dictionary() -> None:
    """Pairs before single tokens, the last one written before earlier ones, nothing where nothing is known."""
    table, singles, pairs = RecycledTokens(12, 3, 4096, CPU), {}, {}
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        previous = torch.randint(-1, 12, (1, 4), generator=generator)
        tokens = torch.randperm(12, generator=generator)[None, :4]
        logits = torch.randn(1, 4, 12, generator=generator)
        kept = torch.rand(1, 4, generator=generator) < 0.7
        table.write(previous, tokens, *table.candidates(logits), kept)
        for node in range(4):
            if kept[0, node]:
                best = logits[0, node].log_softmax(-1).topk(3)
                singles[int(tokens[0, node])] = best
                if previous[0, node] >= 0:
                    pairs[int(previous[0, node]), int(tokens[0, node])] = best
    assert len(pairs) > 8
    for before in range(-1, 12):
        for token in range(12):
            log_probs, ids = table.look_up(torch.tensor([[before]]), torch.tensor([[token]]))
            wanted = pairs.get((before, token), singles.get(token))
            on_host = table.row(before, token)
            assert on_host == (log_probs[0, 0].tolist(), ids[0, 0].tolist(), (before, token) in pairs)
            if wanted is None:
                assert (log_probs == -torch.inf).all()
            else:
                torch.testing.assert_close(log_probs[0, 0], wanted.values)
                assert ids[0, 0].tolist() == wanted.indices.tolist()


def test_pairs_that_fall_on_one_place_are_told_apart() -> None:
    table = RecycledTokens(12, 2, 1, CPU)
    for before in (3, 4):
        logits = torch.nn.functional.one_hot(torch.tensor([[before]]), 12).float()
        table.write(torch.tensor([[before]]), torch.tensor([[7]]), *table.candidates(logits), torch.tensor([[True]]))
    assert table.look_up(torch.tensor([[4]]), torch.tensor([[7]]))[1][0, 0, 0] == 4
    assert table.look_up(torch.tensor([[3]]), torch.tensor([[7]]))[1][0, 0, 0] == 4  # its own row went: the token's


def test_a_row_is_asked_for_its_best_four_and_trusted_more_where_two_tokens_are_the_same() -> None:
    table, probs = RecycledTokens(12, 6, 4096, CPU), torch.full((1, 1, 12), 1e-9)
    probs[0, 0, [4, 9, 1, 2, 8]] = torch.tensor([0.6, 0.2, 0.12, 0.05, 0.03])
    table.write(torch.tensor([[3]]), torch.tensor([[7]]), *table.candidates(probs.log()), torch.tensor([[True]]))
    sure = _RecycledCandidates(table, 3, 7)
    assert sure.start == (3, 7)
    for place, trust in ((sure.start, 0.8), ((4, 7), 0.3), ((-1, 7), 0.3)):
        found = sure.after(place)
        assert [candidate.token for candidate in found] == [4, 9, 1, 2]
        expected = [trust * p for p in (0.6, 0.2, 0.12, 0.05)]
        assert [candidate.probability for candidate in found] == pytest.approx(expected)
    assert sure.after((3, 8)) == []
    assert sure.follow((3, 7), 5) == (7, 5)
    probs[0, 0, [1, 2, 8]] = 0.01  # not worth a thought
    table.write(torch.tensor([[3]]), torch.tensor([[7]]), *table.candidates(probs.log()), torch.tensor([[True]]))
    assert [candidate.token for candidate in sure.after((3, 7))] == [4, 9]


SESSIONS = pytest.mark.parametrize("session_type", [_RecyclingSession, _HostRecyclingSession])
"""With operations on tensors, and with lists on the host."""


def observed(
    session_type: type[_RecyclingSession], tree: TokenTree, paths: list[list[int]], last: list[int]
) -> tuple[RecycledTokens, Tensor, Any]:
    """The table, the verified logits and the session after one step that began behind a prompt."""
    table = RecycledTokens(12, 3, 4096, CPU)
    ids = torch.tensor([[6, token] for token in last])
    session = session_type(table, DraftContext(ids, None, tree.tokens[:, 0]))
    logits = torch.randn(*tree.tokens.shape, 12, generator=torch.Generator().manual_seed(0))
    path = torch.tensor(paths)
    acceptance = SimpleNamespace(path=path, num_kept=(path >= 0).sum(-1), next_token=torch.tensor([10] * len(last)))
    session.observe(
        SimpleNamespace(draft=Draft(tree), acceptance=acceptance, verification=SimpleNamespace(logits=logits))  # type: ignore[arg-type]
    )
    return table, logits, session


@SESSIONS
def test_every_verified_node_is_kept_with_the_token_before_it(session_type: type[_RecyclingSession]) -> None:
    """Also those that were not accepted; not padding, nor anything of a row that has ended."""
    tree = TokenTree(torch.tensor([[5, 7, 8, 9, 5], [1, 2, 3, 4, 11]]), torch.tensor([-1, 0, 0, 1, -1]))
    table, logits, session = observed(session_type, tree, [[0, 1], [-1, -1]], [2, 4])
    for node, (before, token) in enumerate([(2, 5), (5, 7), (5, 8), (7, 9)]):
        log_probs, ids, paired = table.row(before, token)
        assert paired
        assert ids == logits[0, node].topk(3).indices.tolist()
        assert log_probs == pytest.approx(logits[0, node].log_softmax(-1).topk(3).values.tolist())
        assert table.row(-1, token)[1] == ids
    known = (table.log_probs[0][:-1, 0] > -torch.inf).nonzero()[:, 0].tolist()
    assert known == [5, 7, 8, 9]
    assert session._previous.tolist() == [7, 4]
    assert session._roots.tolist() == [10, 10]


@SESSIONS
def test_of_equal_pairs_the_last_one_of_the_text_stays(session_type: type[_RecyclingSession]) -> None:
    tree = TokenTree(torch.tensor([[5, 5, 5]]), torch.tensor([-1, 0, 1]))
    for path, node in (([0, -1, -1], 0), ([0, 1, -1], 1)):
        table, logits, _ = observed(session_type, tree, [path], [5])
        assert table.row(5, 5)[1] == logits[0, node].topk(3).indices.tolist()


def test_lists_and_tensors_learn_the_same() -> None:
    """Random trees of different tokens, in up to three rows; some keep nothing, some have no known token before."""
    generator = torch.Generator().manual_seed(0)
    tables = [RecycledTokens(40, 3, 2**16, CPU) for _ in range(2)]
    for batch_size in (1, 2, 3) * 8:
        tokens = torch.randperm(40, generator=generator)[: 8 * batch_size].view(batch_size, 8)
        parents = torch.stack([torch.randint(-1, node, (batch_size,), generator=generator) for node in range(8)], -1)
        parents[:, 1:] = torch.where(torch.rand(batch_size, 7, generator=generator) < 0.2, -1, parents[:, 1:])
        tree = TokenTree(tokens, parents)
        kept = torch.where(torch.rand(batch_size, generator=generator) < 0.3, -1, 0)[:, None]
        child = torch.where((parents[:, 1] == 0) & (kept[:, 0] == 0), 1, -1)[:, None]
        path, previous = torch.cat([kept, child], -1), torch.randint(-1, 40, (batch_size,), generator=generator)
        best = tables[0].candidates(torch.randn(batch_size, 8, 40, generator=generator))
        last = [
            way(table, tree, *best, path, previous) for way, table in zip((learn, learn_on_host), tables, strict=True)
        ]
        assert last[0].tolist() == last[1].tolist()
    assert all(int((table.keys[:-1] >= 0).sum()) > 30 for table in tables)
    for one, other in zip(*(table.tensors().values() for table in tables), strict=True):
        assert one[:-1].tolist() == other[:-1].tolist()  # the last entry of each receives what is not to be written


@pytest.fixture
def model() -> Any:
    """A tiny Llama with a drafter that has learned nothing."""
    made: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    made.add_drafter(TokenRecyclingDrafter())
    return made


def run(model: Any, batch_size: int = 1, **options: Any) -> Tensor:
    ids, mask = prompts(batch_size)
    answer: Tensor = model.generate(ids, attention_mask=mask, **{**OPTIONS, **options})
    return answer


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_history_changes_the_speed_alone(model: Any, batch_size: int) -> None:
    """The same text again is drafted better: every node of its path was seen before."""
    plain, drafter, taus = run(model, batch_size), model.drafters["token_recycling"], []
    for _ in range(2):
        assert torch.equal(plain, run(model, batch_size, speculative=CHAIN))
        taus.append(model.last_speculation.mean_accepted_length)
    assert taus[1] > taus[0] + 0.05
    drafter.reset()
    assert torch.equal(plain, run(model, batch_size, speculative=CHAIN))
    assert model.last_speculation.mean_accepted_length == taus[0]


def test_it_learns_from_the_prompt_where_it_is_asked_to(model: Any) -> None:
    plain = run(model)
    model.add_drafter(TokenRecyclingDrafter(reads_prompt=True))
    ids = plain[:, :-1]  # the answer as a prompt: what followed its tokens is known from the prompt alone
    mask = torch.ones_like(ids)
    options = {"attention_mask": mask, "max_new_tokens": 1, "do_sample": False}
    model.generate(ids, speculative="token_recycling", **options)
    table = model.drafters["token_recycling"].table
    known = (table.log_probs[0][:-1, 0] > -torch.inf).nonzero()[:, 0].tolist()
    assert set(ids[0].tolist()) <= set(known)
    logits = model(ids, use_cache=False).logits[0].detach()
    log_probs, found = table.look_up(ids[:, -2:-1], ids[:, -1:])
    torch.testing.assert_close(log_probs[0, 0], logits[-1].log_softmax(-1).topk(8).values)
    assert found[0, 0, 0] == logits[-1].argmax()


def test_only_known_tokens_are_drafted(model: Any) -> None:
    """On the CPU a tree is as wide as what is known; padding elsewhere."""
    drafts = Recorder(model.drafters["token_recycling"], prompts(3)[0]).drafts
    run(model, 3, speculative="token_recycling")
    assert drafts[0].tree.num_nodes == 1  # nothing is known yet
    for draft in drafts:
        draft.tree.validate()
        assert draft.log_probs is not None
        drafted = draft.tree.parents >= 0
        assert (draft.log_probs[drafted] > -torch.inf).all()
    assert max(draft.tree.num_nodes for draft in drafts) == 8
    assert any(
        bool((draft.num_drafted < draft.tree.num_nodes - 1).any()) for draft in drafts
    )  # ragged rows are padded


def test_nothing_hangs_on_what_is_not_known() -> None:
    """A place that no candidate fills looks like token 0, of which much may be known."""
    table = RecycledTokens(12, 2, 64, CPU)
    scores = torch.full((1, 1, 12), -torch.inf)
    scores[0, 0, 7] = 0.0  # one candidate, and no second
    table.write(torch.tensor([[-1]]), torch.tensor([[5]]), *table.candidates(scores), torch.tensor([[True]]))
    logits = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(0))
    table.write(torch.tensor([[-1]]), torch.tensor([[0]]), *table.candidates(logits), torch.tensor([[True]]))
    table.ids[0][5, 1] = 0
    context = DraftContext(torch.zeros(1, 0, dtype=torch.long), None, torch.tensor([5]))
    draft = _RecyclingSession(table, context).propose(Budget(num_nodes=8, num_steps=3, top_k=2))
    draft.tree.validate()
    assert draft.tree.tokens.tolist() == [[5, 7]]
    assert draft.tree.parents.tolist() == [[-1, 0]]


def test_behind_a_prompt_without_ids_the_first_token_has_none_before_it() -> None:
    table = RecycledTokens(12, 2, 64, CPU)
    for before, follower in ((1, 3), (-1, 4)):
        logits = torch.nn.functional.one_hot(torch.tensor([[follower]]), 12).float() * 9
        table.write(torch.tensor([[before]]), torch.tensor([[5]]), *table.candidates(logits), torch.tensor([[True]]))
    for ids, wanted in ((torch.tensor([[1]]), 3), (torch.zeros(1, 0, dtype=torch.long), 4)):
        session = _RecyclingSession(table, DraftContext(ids, None, torch.tensor([5])))
        assert session.propose(Budget(num_nodes=2, num_steps=1, top_k=1)).tree.tokens.tolist() == [[5, wanted]]


def test_saved_and_loaded(model: Any, tmp_path: Path) -> None:
    """What was loaded drafts as what was saved does."""
    plain = run(model, speculative=CHAIN)
    learned, path = model.drafters["token_recycling"], tmp_path / "recycled.safetensors"
    learned.save(path)
    assert torch.equal(plain, run(model, speculative=CHAIN))
    steps = model.last_speculation.accepted_per_step
    fresh = TokenRecyclingDrafter()
    with pytest.raises(InvalidConfigError, match="not bound to a model"):
        fresh.load(path)
    model.add_drafter(fresh)
    fresh.load(path)
    assert torch.equal(plain, run(model, speculative=CHAIN))
    assert model.last_speculation.accepted_per_step == steps
    model.add_drafter(TokenRecyclingDrafter(width=4))
    with pytest.raises(CheckpointFormatError, match="`width` and `pairs`"):
        model.drafters["token_recycling"].load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointFormatError, match="is not a token-recycling table"):
        fresh.load(path)
    assert learned.table is not None
    learned.table.ids[0][3] = 999
    learned.save(path)
    with pytest.raises(CheckpointFormatError, match="outside this model's vocabulary"):
        fresh.load(path)
    learned.table.ids[0][3] = 9
    for value in (0.5, torch.nan):
        learned.table.log_probs[1][3] = value
        learned.save(path)
        with pytest.raises(CheckpointFormatError, match="not log-probabilities"):
            fresh.load(path)


def test_another_vocabulary_is_learned_anew(model: Any) -> None:
    run(model, speculative="token_recycling")
    model.resize_token_embeddings(zoo.VOCAB_SIZE - 6)
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = model.generate(ids, **OPTIONS)
    assert torch.equal(plain, model.generate(ids, speculative="token_recycling", **OPTIONS))
    assert model.drafters["token_recycling"].table.vocab_size == zoo.VOCAB_SIZE - 6


@pytest.mark.parametrize("how", ["modes", "adding it again", "a copy of its settings"])
def test_what_was_learned_outlives_every_bind(model: Any, how: str) -> None:
    """A model is bound again whenever it changes: after training steps, an adapter, another drafter."""
    if how == "adding it again":
        model.add_drafter(TokenRecyclingDrafter())
    run(model, speculative="token_recycling")
    drafter = (model.drafters | model._speculation.made)["token_recycling"]
    learned = {name: tensor.clone() for name, tensor in drafter.table.tensors().items()}
    assert bool((learned["log_probs"] > -torch.inf).any())
    if how == "modes":
        model.train()
        model.eval()
        model._speculation.bound.clear()  # as if everything about the model were new
    elif how == "adding it again":
        model.add_drafter(drafter, "again")
    else:
        model.add_drafter(TokenRecyclingDrafter(), "another")
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False, speculative="token_recycling")
    for name, tensor in drafter.table.tensors().items():
        same = float((tensor == learned[name]).float().mean())
        assert same > 0.95, (how, name, same)
    known = learned["log_probs"] > -torch.inf
    assert bool((drafter.table.tensors()["log_probs"][known] > -torch.inf).all())


def test_a_skimmed_step_is_followed_and_teaches_nothing() -> None:
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    ids, mask = prompts(3)
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    seen: list[tuple[list[int], list[int], list[int]]] = []

    class Plain(FixedController):
        """Plain steps, which nobody drafts."""

        def next(self) -> Budget:
            return PLAIN_STEP

        def observe(self, step: Step) -> None:
            session = sessions[-1]
            seen.append((session._previous.tolist(), session._roots.tolist(), step.draft.tree.tokens[:, 0].tolist()))

    sessions: list[Any] = []
    start = TokenRecyclingDrafter.start

    def watched(self: Any, *given: Any) -> Any:
        sessions.append(start(self, *given))
        return sessions[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "FixedController", Plain)
        patch.setattr(TokenRecyclingDrafter, "start", watched)
        config = {"method": "hybrid", "methods": ["token_recycling"], "adaptive": False}
        found = model.generate(ids, speculative=config, **options)
    assert torch.equal(found, model.generate(ids, **options))
    answers = found[:, ids.shape[1] :].T.tolist()
    assert len(seen) >= 28
    for number, (previous, roots, drafted) in enumerate(seen):
        assert previous == drafted == answers[number]
        assert roots == answers[number + 1]
    table = model._speculation.made["token_recycling"].table
    assert int((table.keys >= 0).sum()) == 0
