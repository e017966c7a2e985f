"""Lookahead: windows and pools against cases worked out by hand, trees within budgets, what steps teach them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from hf_specdec import SpeculativeConfig, SpeculativeGenerationMixin
from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.drafters.base import DraftContext, DraftSession
from hf_specdec.drafters.experimental.lookahead import LookaheadDrafter, LookaheadRow, WindowShape
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.features import PromptPadding
from hf_specdec.verification.step import Step, Verified
from models import prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
VOCAB_SIZE = 50


class AnyTarget:
    """All that a session asks its target."""

    supports_trees = True


def begin(drafter: LookaheadDrafter, ids: Tensor, roots: list[int], **fields: Any) -> DraftSession:
    """A session after a prompt `[B, P]`, 0 is padding."""
    target: Any = AnyTarget()
    context = DraftContext(ids, PromptPadding.of(ids != 0), torch.tensor(roots))
    return drafter.start(target, context, SpeculativeConfig("lookahead", **fields))


def following(tokens: Tensor) -> Tensor:
    """A model that continues t by 2t + 1: its logits at tokens `[B, N]`."""
    return torch.nn.functional.one_hot((2 * tokens + 1) % VOCAB_SIZE, VOCAB_SIZE).float()


def step_of(draft: Draft, emitted: list[tuple[int, ...]]) -> Step:
    """A step that kept the roots and emitted these tokens."""
    rows = tuple(emitted)
    tokens = torch.tensor(rows)
    nodes = ((0,),) * len(rows)
    drafted = tuple(draft.tree.num_drafted.tolist())
    acceptance = Accepted(torch.zeros_like(tokens), tokens, tokens[:, -1], nodes, rows, drafted)
    return Step(draft, Verified(following(draft.tree.tokens), None), acceptance)


# ------------------------------------------------------------------------------------------- the window by hand


def row_of(columns: int, ngram: int, prompt: list[int], guesses: int = 9) -> LookaheadRow:
    """A row whose n-grams come from its window alone; the root is 1."""
    drafter = LookaheadDrafter(window=columns, ngram=ngram, guesses=guesses, reads_prompt=False)
    return LookaheadRow(drafter, [*prompt, 1], WindowShape(columns, ngram))


def test_a_window_grows_and_then_moves() -> None:
    """W = 2, N = 4: three levels. Level 0 begins with W + N - 2 = 4 columns, of which the root takes the first."""
    shape = WindowShape(columns=2, ngram=4)
    assert (shape.first_width, shape.num_nodes, shape.depth) == (4, 5, 3)
    row = row_of(2, 4, [7, 8, 9])
    assert row.levels == [[7, 8, 9, 7]]
    for root, best in ((1, [11, 12, 13, 14]), (2, [21, 22, 23]), (3, [31, 32]), (4, [41, 42])):
        row.read([root])
        row.advance(best)
    assert row.levels == [[22, 23], [31, 32], [41, 42]]
    assert [row.after(token) for token in (3, 7, 4, 14)] == [[(13, 22, 31)], [(14, 23, 32)], [(22, 31, 41)],
                                                             [(23, 32, 42)]]  # fmt: skip


def test_a_window_is_a_tree_that_shares_the_beginnings_of_guesses() -> None:
    """Level 0 is a chain from the root; every column hangs its levels below its node of level 0."""
    row = row_of(3, 3, [0])
    row.levels = [[0, 2, 3], [11, 12, 13]]
    tree = row.tree(Budget(100, 9, 9), WindowShape(3, 3))
    assert (tree.tokens, tree.parents) == ([1, 2, 3, 11, 12, 13], [-1, 0, 1, 0, 1, 2])
    assert row.cells == [3, 4, 5]
    row.store([(1, 2, 3)])
    assert row.tree(Budget(100, 9, 9), WindowShape(3, 3)).tokens == [1, 2, 3, 11, 12, 13]


def test_the_pool_forgets_what_was_not_seen_for_longest() -> None:
    row = row_of(1, 3, [0], guesses=2)
    row.store([(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7), (2, 9, 9)])
    assert [row.after(token) for token in (1, 2, 3)] == [[(6, 7), (2, 3)], [(9, 9)], []]


@pytest.mark.parametrize("ngram", [2, 3, 4, 6])
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_no_window_is_larger_than_its_shape_says(columns: int, ngram: int) -> None:
    shape = WindowShape(columns, ngram)
    row, sizes, depths = row_of(columns, ngram, list(range(2, 40)), guesses=1), list[int](), list[int]()
    for step in range(ngram + 2):
        tree = row.tree(Budget(1000, 0, 9), shape)
        sizes.append(len(tree.tokens) - 1)
        depths.append(int(TokenTree(torch.tensor([tree.tokens]), torch.tensor(tree.parents)).depths().max()))
        row.advance([100 * step + 100 + cell for cell in range(len(row.cells))])
    assert max(sizes) == shape.num_nodes
    assert max(depths) == shape.depth


# ---------------------------------------------------------------------------------------------------- a session


def test_guesses_stand_before_the_window() -> None:
    """What comes first is what a target without branches keeps; both fit the budget."""
    drafter = LookaheadDrafter(window=2, ngram=3, guesses=2)
    ids = torch.tensor([[4, 5, 6, 4, 7, 8, 4]])
    session = begin(drafter, ids, [4])  # 4 was followed by 5, 6, later by 7, 8, last by itself
    draft = session.propose(drafter.limits(SpeculativeConfig("lookahead")))
    draft.tree.validate()
    assert draft.log_probs is None
    assert draft.tree.tokens[0].tolist() == [4, 7, 8, 5, 6, 8, 4]  # the guesses, then level 0 of the window
    assert draft.tree.parents[0].tolist() == [-1, 0, 1, 0, 3, 0, 5]
    chain = draft.tree.first_children().tokens
    assert chain[0, :3].tolist() == [4, 7, 8]
    assert session.propose(Budget(3, 2, 1)).tree.tokens.tolist() == [[4, 7, 8]]
    assert session.propose(Budget(2, 1, 1)).tree.tokens.tolist() == [[4, 7]]
    assert session.propose(Budget(1, 0, 1)).tree.tokens.tolist() == [[4]]


def window_of(session: Any, row: int = 0) -> list[list[int]]:
    levels: list[list[int]] = session._rows[row].levels
    return levels


def test_a_session_reads_the_choices_at_its_last_level() -> None:
    """W = 2, N = 3, without the text's own n-grams: after two steps the window has made the model's own."""
    drafter = LookaheadDrafter(window=2, ngram=3, guesses=2, reads_prompt=False)
    everything = drafter.limits(SpeculativeConfig("lookahead"))
    session = begin(drafter, torch.tensor([[7, 8, 9]]), [1])
    draft = session.propose(everything)
    assert draft.tree.tokens.tolist() == [[1, 8, 9]]  # level 0 alone: the root, then what the prompt ended with
    session.observe(step_of(draft, [(3,)]))
    assert window_of(session) == [[8, 9], [17, 19]]  # 2t + 1 after 8 and 9
    draft = session.propose(everything)
    assert draft.tree.tokens.tolist() == [[3, 9, 17, 19]]
    assert draft.tree.parents.tolist() == [[-1, 0, 0, 1]]
    session.observe(step_of(draft, [(7,)]))
    assert window_of(session) == [[17, 19], [35, 39]]
    draft = session.propose(everything)  # 3 -> 17, 35 and 9 -> 19, 39 are known: nothing begins with 7
    assert draft.tree.tokens.tolist() == [[7, 19, 35, 39]]
    session.observe(step_of(draft, [(9,)]))
    draft = session.propose(everything)
    assert draft.tree.tokens.tolist() == [[9, 19, 39, 39, 21, 29]]  # 9 -> 19, 39 and the window


def test_steps_that_did_not_verify_the_window_leave_it() -> None:
    drafter = LookaheadDrafter(window=2, ngram=3, guesses=2)
    everything = drafter.limits(SpeculativeConfig("lookahead"))
    session = begin(drafter, torch.tensor([[7, 8, 9]]), [1])
    before = copy.deepcopy(window_of(session))
    session.observe(step_of(Draft.plain(torch.tensor([1])), [(3,)]))
    assert window_of(session) == before
    draft = session.propose(everything)
    others = Draft(TokenTree(draft.tree.tokens + 1, draft.tree.parents))
    session.observe(step_of(others, [(4,)]))
    assert window_of(session) == before
    session.propose(everything)
    session.observe(step_of(Draft.plain(torch.tensor([4])), [(6,)]))
    assert window_of(session) == before
    # the text was read all the same: 9, 1, 3 and 1, 3, 4 and 3, 4, 6 are known
    row = session._rows[0]  # type: ignore[attr-defined]
    assert [row.after(token) for token in (9, 1, 3)] == [[(1, 3)], [(3, 4)], [(4, 6)]]


def test_every_row_has_its_own() -> None:
    """Left padding is no text; a row that has ended, or repeats its padding, keeps its window."""
    drafter = LookaheadDrafter(window=2, ngram=3)
    session = begin(drafter, torch.tensor([[7, 8, 9], [0, 0, 5]]), [1, 2])
    assert [window_of(session, row) for row in (0, 1)] == [[[7, 8, 9]], [[5, 5, 5]]]
    draft = session.propose(drafter.limits(SpeculativeConfig("lookahead")))
    repeated = draft.with_repeated(0, torch.tensor([False, True]))
    session.observe(step_of(repeated, [(3,), (0,)]))
    assert [len(window_of(session, row)) for row in (0, 1)] == [2, 1]
    draft = session.propose(drafter.limits(SpeculativeConfig("lookahead")))  # windows of different ages
    draft.tree.validate()
    session.observe(step_of(draft, [(3,), (0,)]))
    assert [len(window_of(session, row)) for row in (0, 1)] == [2, 2]


# ------------------------------------------------------------------------------------------------------ settings


def test_the_window_shrinks_to_its_limits() -> None:
    drafter = LookaheadDrafter(window=5, ngram=4, guesses=5)
    whole = drafter.limits(SpeculativeConfig("lookahead"))
    assert whole == Budget(30, 6, 7)
    assert drafter.window_within(whole) == WindowShape(5, 4)
    assert drafter.window_within(Budget(18, 6, 3)) == WindowShape(5, 4)
    assert drafter.window_within(Budget(17, 6, 3)) == WindowShape(4, 4)
    assert drafter.window_within(Budget(30, 4, 7)) == WindowShape(3, 4)
    assert drafter.window_within(whole.chain) is None
    assert drafter.window_within(Budget(6, 6, 7)) is None


# ---------------------------------------------------------------------------------------------------- generation


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Any:
    """Full attention, sliding windows, a recurrent state (which verifies chains)."""
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(request.param)))


SETTINGS = [
    LookaheadDrafter(),
    LookaheadDrafter(window=7, ngram=5, guesses=3, reads_prompt=False),
    LookaheadDrafter(window=1, ngram=2, guesses=1),
]


@pytest.mark.parametrize("drafter", SETTINGS, ids=repr)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_plain_answer(model: Any, drafter: LookaheadDrafter, batch_size: int) -> None:
    ids, mask = prompts(batch_size)
    model.add_drafter(drafter)
    plain = model.generate(ids, attention_mask=mask, **OPTIONS)
    random = torch.get_rng_state()
    assert torch.equal(plain, model.generate(ids, attention_mask=mask, speculative="lookahead", **OPTIONS))
    assert torch.equal(random, torch.get_rng_state())  # the window is filled without random numbers
    assert model.last_speculation.num_target_forwards > 1


def counting_llama() -> Any:
    """A Llama that follows every token by one fixed token, so that its greedy answer runs into a circle of 8."""
    model: Any = copy.deepcopy(zoo.build("llama"))
    with torch.no_grad():
        for layer in model.model.layers:  # without layers' outputs only the embedding of the last token counts
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        vectors = torch.randn(zoo.VOCAB_SIZE, 32, generator=torch.Generator().manual_seed(0))
        model.model.embed_tokens.weight.copy_(vectors)
        successors = torch.arange(zoo.VOCAB_SIZE)
        successors[8:16] = torch.tensor([9, 10, 11, 12, 13, 14, 15, 8])
        model.lm_head.weight.zero_()
        model.lm_head.weight[successors[8:16]] = vectors[8:16]
    return SpeculativeGenerationMixin.attach(model)


@pytest.mark.parametrize("reads_prompt", [True, False])
def test_a_text_that_repeats_itself_is_accepted(reads_prompt: bool) -> None:
    """Also where the window alone finds the n-grams: a token's successor never changes, so every branch comes true."""
    model = counting_llama()
    ids = torch.tensor([[8, 9, 10]])
    model.add_drafter(LookaheadDrafter(reads_prompt=reads_prompt))
    plain = model.generate(ids, **{**OPTIONS, "max_new_tokens": 48})
    assert plain[0, :20].tolist() == [8 + place % 8 for place in range(20)]
    assert torch.equal(plain, model.generate(ids, speculative="lookahead", **{**OPTIONS, "max_new_tokens": 48}))
    assert model.last_speculation.mean_accepted_length > 3.0
