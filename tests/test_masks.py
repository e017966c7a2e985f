"""Masks and positions against one slot at a time, for every layer kind, with ragged rows and padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.features import PromptPadding
from hf_specdec.verification.masks import MaskLayout, Positions, TreeInputs, bucket_masks, tree_masks
from reference import path_to_root

PARENTS = [[-1, 0, 0, 1, 3], [-1, 0, 1, 2, -1]]
LENGTHS = [9, 12]
PROMPT = torch.tensor([[0, 0, 1, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1, 1]])


def layout_of(kind: str, size: int, additive: bool = False) -> MaskLayout:
    return MaskLayout(((f"{kind}_attention", kind, size),), additive)  # type: ignore[arg-type]


def slow_sees(kind: str, size: int, row: int, node: int, slot: int) -> bool:
    """Whether a node sees a slot, from the definitions."""
    start, length = max(LENGTHS), LENGTHS[row]
    path = path_to_root(PARENTS[row], node)
    query = length + len(path) - 1
    if slot < start:
        if slot >= length or (slot < PROMPT.shape[1] and PROMPT[row, slot] == 0):
            return False
        key = slot
    else:
        if slot - start not in path:
            return False
        key = length + len(path_to_root(PARENTS[row], slot - start)) - 1
    left = int(PROMPT[row].argmax())
    if kind == "sliding":
        return query - key < size
    if kind == "chunked":
        return (query - left) // size == (key - left) // size
    return True


@pytest.mark.parametrize(("kind", "size"), [("full", 0), ("sliding", 3), ("sliding", 8), ("chunked", 4)])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_equal_the_definition(kind: str, size: int, additive: bool) -> None:
    tree = TokenTree(torch.zeros(2, 5, dtype=torch.long), torch.tensor(PARENTS))
    padding = PromptPadding.of(PROMPT)
    assert padding is not None
    ancestors, lengths, start = tree.ancestor_mask(), torch.tensor(LENGTHS), max(LENGTHS)
    mask = tree_masks(layout_of(kind, size, additive), ancestors, lengths, start, padding, torch.float32)
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (2, 1, 5, 12 + 5)
    if additive:
        assert mask.dtype == torch.float32
        assert set(mask.unique().tolist()) == {0.0, torch.finfo(torch.float32).min}
        mask = mask == 0
    for row in range(2):
        for node in range(5):
            wanted = [slow_sees(kind, size, row, node, slot) for slot in range(17)]
            assert mask[row, 0, node].tolist() == wanted, (row, node)
    assert mask.any(-1).all()
    valid = torch.nn.functional.pad(padding.valid, (0, 12 + 9 - 7), value=True)  # four more slots than are used
    in_bucket = bucket_masks(layout_of(kind, size), ancestors, lengths, start + torch.arange(5), valid, padding.left)[
        f"{kind}_attention"
    ]
    assert torch.equal(in_bucket[..., :17], mask)
    assert not in_bucket[..., 17:].any()


def test_positions_count_tokens_not_slots() -> None:
    depths = torch.tensor([[0, 1, 1, 2]])
    assert Positions.of(None, 3, depths.device).of_nodes(depths, torch.tensor([5])).tolist() == [[5, 6, 6, 7]]
    prompt_ids = torch.tensor([[0, 0, 0, 1, 2]])
    assert Positions.of(prompt_ids, 5, depths.device).of_nodes(depths, torch.tensor([5])).tolist() == [[3, 4, 4, 5]]


def test_positions_keep_the_sections_of_rotary_ids() -> None:
    """A multimodal prompt's `[3, B, P]` ids go on in every section, as in plain generate."""
    prompt_ids = torch.tensor([[[0, 1]], [[0, 4]], [[0, 2]]])
    positions = Positions.of(prompt_ids, 2, prompt_ids.device).of_nodes(torch.tensor([[0, 1]]), torch.tensor([3]))
    assert positions.tolist() == [[[3, 4]], [[6, 7]], [[4, 5]]]


def test_padding_of_a_part_of_the_prompt_and_after_virtual_tokens() -> None:
    padding = PromptPadding.of(torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 1]]))
    assert padding is not None
    assert padding.last(4).valid.tolist() == [[False, True, True, True], [False, True, True, True]]
    assert padding.extended_to(7).counts.tolist() == [2, 1]
    assert padding.extended_to(7).left.tolist() == [0, 0]
    assert padding.extended_to(5) is padding
    assert PromptPadding.of(None) is PromptPadding.of(torch.ones(2, 4)) is None


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, [("full_attention", "full", 0)]),
        ({"sliding_window": 8}, [("sliding_attention", "sliding", 8)]),
        ({"attention_chunk_size": 8}, [("chunked_attention", "chunked", 8)]),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
            [("full_attention", "full", 0), ("sliding_attention", "sliding", 4)],
        ),
    ],
)
def test_layout_follows_the_configuration(fields: dict[str, object], wanted: list[object]) -> None:
    layout = MaskLayout.of(SimpleNamespace(_attn_implementation="sdpa", **fields))
    assert list(layout.layers) == wanted
    assert not layout.additive
    assert MaskLayout.of(SimpleNamespace(_attn_implementation="eager")).additive


@pytest.mark.parametrize("layers", [("full",), ("full", "sliding")])
def test_later_nodes_see_what_they_see_in_the_whole_tree(layers: tuple[str, ...]) -> None:
    tree = TokenTree(torch.zeros(2, 5, dtype=torch.long), torch.tensor(PARENTS))
    layout = MaskLayout(tuple((f"{kind}_attention", kind, 3) for kind in layers), False)  # type: ignore[misc]
    positions = Positions.of(None, 7, torch.device("cpu"))
    inputs = TreeInputs(tree, torch.tensor(LENGTHS), 12, None, positions, layout, torch.float32, False)
    (whole, places), (later, later_places) = inputs.masks_and_positions(), inputs.masks_and_positions(3)
    assert torch.equal(later_places, places[:, 3:])
    for name in ("full_attention", "sliding_attention")[: len(layers)]:
        one, other = (mask if isinstance(mask, torch.Tensor) else mask[name] for mask in (whole, later))
        assert torch.equal(other, one[:, :, 3:])
