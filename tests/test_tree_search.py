"""The tree search: accuracies counted, trees grown, the size chosen, against enumeration by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from drafters import random_block, random_head
from hf_specdec import InvalidConfigError, MedusaConfig, MedusaHeads, SpeculativeConfig, load_head
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.training import Conversation, capture_features, search_tree, train_dflash, tree_search
from hf_specdec.training.tree_search import count_correct
from hf_specdec.trees.growth import likeliest_choices, node_acceptance
from hf_specdec.validation import validate_choices
from hf_specdec.viz import plot_tree, save_plot
from trained import answered, arguments

ACCURACIES = ((0.6, 0.2, 0.1), (0.5, 0.1, 0.05), (0.4, 0.3, 0.0))


@pytest.mark.parametrize("num_nodes", [2, 5, 9, 14])
def test_no_tree_of_that_size_is_better(num_nodes: int) -> None:
    grown = likeliest_choices(ACCURACIES, num_nodes)
    validate_choices(grown)
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    best = sorted((node_acceptance(path, ACCURACIES) for path in every), reverse=True)[: num_nodes - 1]
    assert sum(node_acceptance(path, ACCURACIES) for path in grown) == pytest.approx(sum(best))


def random_medusa(model: Any) -> MedusaHeads:
    torch.manual_seed(3)
    heads = MedusaHeads(MedusaConfig.for_target(model.config, medusa_num_heads=2, draft_vocab_size=60))
    heads.set_hot_token_ids(torch.randperm(zoo.VOCAB_SIZE)[:60].sort().values)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return heads


def test_accuracies_are_what_enumeration_finds(llama: Any, tmp_path: Path) -> None:
    """Medusa: rank r of head k at t is right where it is the target's choice after t+1+k."""
    heads = random_medusa(llama)
    ids = torch.randint(3, zoo.VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1))
    talks = [Conversation.of(ids[:6].tolist(), ids[6:].tolist()), Conversation.of(ids[:3].tolist(), ids[3:9].tolist())]
    right, count, accepted, chains = torch.zeros(2, 4), torch.zeros(2), torch.zeros(2), torch.zeros(2)
    hot = heads.hot_token_ids
    assert hot is not None
    for talk in talks:
        tokens = torch.tensor(talk.input_ids)
        states = llama(input_ids=tokens[None], output_hidden_states=True, use_cache=False).hidden_states[-1][0]
        chosen = llama.lm_head(states).argmax(-1)
        whole = greedy = False
        for place, head in itertools.product(range(len(tokens)), range(2)):
            if place + 2 + head < len(tokens) and talk.loss_mask[place + 2 + head]:
                logits = llama.lm_head.weight[hot] @ _hidden(heads, head, states[place])
                ranked = hot[logits.argsort(descending=True)][:4]
                right[head] += ranked == chosen[place + 1 + head]
                count[head] += 1
                greedy = greedy or not head  # as long as the text is the target's own choice
                whole = bool(ranked[0] == chosen[place + 1 + head]) and (whole or not head)
                chains[head] += greedy
                accepted[head] += whole and greedy
                greedy = greedy and bool(tokens[place + 2 + head] == chosen[place + 1 + head])
    wanted = right / count[:, None]
    store = capture_features(llama, talks, tmp_path)
    for data in (talks, store):
        found = count_correct(llama, heads, data, num_steps=5, top_k=4)
        torch.testing.assert_close(torch.tensor(found.accuracies), wanted)
        assert found.counted.tolist() == count.tolist()
        assert found.chains.tolist() == chains.tolist()
        assert found.accepted.tolist() == accepted.tolist()


def _hidden(heads: MedusaHeads, head: int, feature: torch.Tensor) -> torch.Tensor:
    for block in heads.heads[head]:
        feature = block(feature)
    return feature


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "fields", "size"),
    [
        (random_head, {"version": 1}, 12),
        (random_head, {"version": 3}, 12),
        (random_block, {"block_size": 4}, 9),
        (random_block, {"sample_from_anchor": True, "markov_rank": 4, "markov_head_type": "gated"}, 9),
    ],
    ids=["EAGLE", "EAGLE-3", "block", "block with a Markov head"],
)
def test_a_searched_tree_is_accepted_as_predicted(
    sure_llama: Any, make: Any, fields: dict[str, Any], size: int, tmp_path: Path
) -> None:
    """On the very data it was calibrated on, greedy, tau is what the search expects, up to independence."""
    head = make(sure_llama, **fields)
    prompts, answers, talks = answered(sure_llama, 6, 40)
    if make is random_block:
        train_dflash(sure_llama, head, talks, arguments(tmp_path, 12, learning_rate=1e-2))
    found = search_tree(sure_llama, head, talks, num_nodes=size, num_steps=2, top_k=8)
    assert 2 < found.num_nodes <= size
    assert [tuple(path) for path in head.config.tree] == list(found.choices)
    assert found.verify_seconds == {}
    sure_llama.load_drafter(head)
    again = sure_llama.generate(prompts, max_new_tokens=40, do_sample=False, speculative=head.method)
    assert torch.equal(again, answers)
    tau = found.expected_tau[found.num_nodes]
    assert sure_llama.last_speculation.mean_accepted_length == pytest.approx(tau, rel=0.3)


def test_the_size_is_what_pays(
    sure_llama: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cheap nodes: the largest tree. Dear nodes: the smallest. It is stored with the heads, and used."""
    heads = random_medusa(sure_llama)
    _, _, talks = answered(sure_llama, 2, 20)
    for price, largest in ((1e-6, True), (10.0, False)):
        monkeypatch.setattr(
            tree_search, "time_forwards", lambda model, sizes, context, p=price: {n: 1 + p * n for n in sizes}
        )
        found = search_tree(sure_llama, heads, talks, max_nodes=16, top_k=4)
        sizes = sorted(found.verify_seconds)[1:]
        assert found.num_nodes == (sizes[-1] if largest else sizes[0])
        assert ("is faster than plain decoding here: the best one, with 2 nodes" in caplog.text) is not largest
        assert found.expected_speed_up is not None
        assert (found.expected_speed_up > 1) is largest
    heads.save_pretrained(tmp_path)
    loaded = load_head(tmp_path)
    assert isinstance(loaded, MedusaHeads)
    assert MedusaDrafter(loaded).choices(SpeculativeConfig("medusa")) == validate_choices(found.choices)
    save_plot(plot_tree(found.choices, found.acceptance), tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size > 1000


def test_searches_that_mean_nothing(llama: Any) -> None:
    heads, talk = random_medusa(llama), Conversation.of([5, 6, 7], [])
    with pytest.raises(InvalidConfigError, match="no answers"):
        search_tree(llama, heads, [talk], num_nodes=8)
    for fields in ({"num_nodes": 1}, {"max_nodes": 1}, {"num_steps": 0}, {"top_k": 0}):
        with pytest.raises(InvalidConfigError, match="of at least 2"):
            search_tree(llama, heads, [talk], **fields)
