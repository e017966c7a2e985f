"""The block drafter: trees against a block computed for each text alone, Markov heads against chains by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from block_engines import Block, corrected
from drafters import DFLASH2, DOMINO, LILICORR, random_block
from hf_specdec import (
    DFlashConfig,
    DFlashHead,
    DrafterMismatchError,
    InvalidConfigError,
    SpeculativeConfig,
    load_head,
)
from hf_specdec.cpu import library
from hf_specdec.cpu.growing import grow_corrected
from hf_specdec.drafters import dflash
from hf_specdec.drafters.dflash import BlockOutputs, DFlashDrafter, grow_block
from hf_specdec.heads.dflash import default_layers
from hf_specdec.trees.draft import Budget
from hf_specdec.trees.growth import StaticLevels, reachable
from hf_specdec.verification.model import CACHE_FIELD, lm_head_rows
from models import prompts
from reference import Recorder, paths_of

NEW_TOKENS = 12
TREE: dict[str, Any] = {"method": "dflash", "top_k": 3, "num_draft_tokens": 12}
CHAIN: dict[str, Any] = {"method": "dflash", "top_k": 1}
CHOICES = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 2)]

SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "causal": {"causal": True},
    "jetspec": {"causal": True, "all_children": True, "num_hidden_layers": 1},
    "window": {**SLIDING},
    "causal window": {**SLIDING, "causal": True, "sliding_causal": True, "sample_from_anchor": True},
    "window from anchor": {**SLIDING, "window_from_anchor": True},
    "vanilla": {"sample_from_anchor": True, "markov_rank": 4},
    "gated": {"markov_rank": 4, "markov_head_type": "gated", "causal": True, "draft_vocab_size": 40},
    "rnn": {"sample_from_anchor": True, "markov_rank": 4, "markov_head_type": "rnn", **SLIDING},
    "rnn behind the root": {"markov_rank": 4, "markov_head_type": "rnn"},
    "dflash2": {**DFLASH2, **SLIDING, "sliding_causal": True},
    "lilicorr": {**LILICORR, **DFLASH2, "selector_rank": 0, "selector_top_k": 0, "causal": True},
    "domino": {**DOMINO, "causal": True},
    "domino from the root": {**DOMINO, "sample_from_anchor": True},
    "own parts": {"own_lm_head": True, "own_embedding": True, "draft_vocab_size": 40, "qkv_bias": True,
                  "aux_hidden_state_layer_ids": [2, 0, -1, 2], "qk_norm": False},
}  # fmt: skip


def generate(model: Any, batch_size: int = 1, **options: Any) -> Tensor:
    ids, mask = prompts(batch_size)
    given = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    answer: Tensor = model.generate(ids, **given)
    return answer


def outputs_after(model: Any, head: DFlashHead, text: list[int], size: int | None = None) -> BlockOutputs:
    """The block behind the last token of a text, from features of a plain forward and without the drafter's code."""
    states: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: states.append(out[0] if isinstance(out, tuple) else out))
        for module in (model.model.embed_tokens, *model.model.layers, model.model.norm)
    ]
    with torch.no_grad():
        model.model(input_ids=torch.tensor([text[:-1]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        lm_head = lm_head_rows(model, head.hot_token_ids)
        block = Block(head, model.get_input_embeddings(), lm_head)
        block.append(torch.cat([states[layer] for layer in head.feature_layers], dim=-1))
        return block.outputs(text[-1], size)


def steps_of(model: Any, batch_size: int, plain: Tensor | None = None, **config: Any) -> list[Any]:
    """For each row, text, tokens and parents of every step, without those that the end of the answer cuts short."""
    ids, mask = prompts(batch_size)
    answer = generate(model, batch_size, speculative={**config, "trace": True})
    assert plain is None or torch.equal(plain, answer)
    trace, found = model.last_speculation.trace, []
    for row in range(batch_size):
        text = ids[row][mask[row].bool()].tolist()
        end, steps = len(text) + NEW_TOKENS, []
        text.append(trace[0].rows[row].tokens[0])
        for step in trace:
            record = step.rows[row]
            if record.emitted and len(text) < end - 5:
                assert record.tokens[0] == text[-1]
                steps.append((list(text), record.tokens, record.parents))
            text.extend(record.emitted)
        found.append(steps)
    return found


# ------------------------------------------------------------------------------------------------------ trees


@pytest.mark.parametrize("variant", VARIANTS)
def test_trees_are_those_of_a_block_for_each_text_alone(small: Any, variant: str) -> None:
    """In a left-padded batch as in a row alone; dynamic trees, static ones and chains."""
    head = random_block(small, 3, **VARIANTS[variant])
    small.add_drafter(DFlashDrafter(head))
    plain = generate(small, 3)
    static = {"method": "dflash", "tree": CHOICES}
    for config in (TREE, CHAIN, static):
        together = steps_of(small, 3, plain, **config)
        if config is static:
            shape: Any = StaticLevels.of(sorted(CHOICES, key=lambda path: (len(path), path)), torch.device("cpu"))
        else:
            limits = DFlashDrafter(head).limits(SpeculativeConfig(**config))
            shape = reachable(limits) if not head.config.markov_rank else limits
        for row in range(3):
            assert len(together[row]) > 3
            for text, tokens, parents in together[row]:
                depth = len(shape.steps) if isinstance(shape, StaticLevels) else shape.num_steps
                size = depth + (not head.config.sample_from_anchor)
                wanted = grow_block(outputs_after(small, head, text, size), shape).tree
                assert tokens == wanted.tokens[0].tolist()
                assert parents == wanted.parents.expand(wanted.tokens.shape)[0].tolist()


@pytest.mark.parametrize("variant", ["dflash", "causal", "causal window", "rnn"])
def test_smaller_budgets_between_full_ones(small: Any, variant: str, wandering: list[Any]) -> None:
    """Plain steps in between; a non-causal block has the slots of the largest tree, whatever a step asks for."""
    head = random_block(small, 3, **VARIANTS[variant])
    recorder = Recorder(drafter := DFlashDrafter(head), prompts(1)[0])
    small.add_drafter(drafter)
    assert torch.equal(generate(small, max_new_tokens=30), generate(small, max_new_tokens=30, speculative=TREE))
    assert len(set(recorder.budgets)) > 2
    deepest = head.config.block_size
    for (texts, tree), budget in zip(recorder.trees, recorder.budgets, strict=True):
        size = budget.num_steps + (not head.config.sample_from_anchor) if head.config.causal else deepest
        wanted = grow_block(outputs_after(small, head, texts[0], size), reachable(budget)).tree
        assert tree.tokens.tolist() == wanted.tokens.tolist()


@pytest.mark.parametrize(
    "variant", ["vanilla", "gated", "rnn", "rnn behind the root", "domino", "domino from the root"]
)
def test_a_chain_of_a_markov_head_is_corrected_token_by_token(small: Any, variant: str) -> None:
    head = random_block(small, 7, **VARIANTS[variant])
    small.add_drafter(DFlashDrafter(head))
    uncorrected = 0
    for text, tokens, parents in steps_of(small, 1, **CHAIN)[0]:
        outputs = outputs_after(small, head, text)
        chain = corrected(outputs)[1].tolist()
        assert tokens[1:] == chain
        assert parents == list(range(-1, len(chain)))
        uncorrected += outputs.logits[0].argmax(-1).tolist() == chain
    assert uncorrected == 0


def test_children_depend_on_the_path_only_with_a_markov_head(small: Any) -> None:
    choices = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    for rank, differ in ((0, False), (4, True)):
        small.add_drafter(DFlashDrafter(random_block(small, 1, sample_from_anchor=True, markov_rank=rank)))
        found = set()
        for _, tokens, parents in steps_of(small, 1, method="dflash", tree=choices)[0]:
            children = [[tokens[n] for n in range(len(tokens)) if parents[n] == node] for node in (1, 2)]
            assert [len(each) for each in children] == [2, 2]
            found.add(children[0] != children[1])
        assert (True in found) is differ
        assert len(found) == 1 or differ


@pytest.mark.parametrize("variant", ["dflash2", "lilicorr"])
def test_pairs_of_candidates_give_the_likeliest_tree_of_all(small: Any, variant: str) -> None:
    """Of all paths through the candidates, those with the greatest product of probabilities after the one above."""
    head = random_block(small, 2, **VARIANTS[variant])
    count, changed = head.config.num_candidates, 0
    small.add_drafter(DFlashDrafter(head))
    with pytest.raises(InvalidConfigError, match=f"has {count} candidates per depth, got top_k={count + 1}"):
        generate(small, speculative={"method": "dflash", "top_k": count + 1})
    config = {"method": "dflash", "top_k": count, "num_draft_tokens": 14}
    for text, tokens, parents in steps_of(small, 1, **config)[0]:
        candidates, log_probs = outputs_after(small, head, text).lattice
        scores: dict[tuple[int, ...], float] = {(): 0.0}
        for depth in range(candidates.shape[1]):
            for path in [path for path in scores if len(path) == depth]:
                row = log_probs[0, depth, path[-1] if path else 0].tolist()
                scores |= {(*path, number): scores[path] + row[number] for number in range(count)}
        del scores[()]
        best = sorted(scores, key=lambda path: -scores[path])[:13]
        wanted = {tuple(int(candidates[0, depth, number]) for depth, number in enumerate(path)) for path in best}
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, len(tokens)):
            paths[node] = (*paths[parents[node]], tokens[node])
        assert set(paths.values()) - {()} == wanted
        unary = outputs_after(small, head, text).logits[0].argmax(-1)
        changed += corrected(outputs_after(small, head, text))[1].tolist() != unary.tolist()
    assert changed > 3, "the pairs decide"


def test_jetspecs_rule_is_that_of_its_heads(small: Any) -> None:
    """The same outputs, and another choice of nodes: parents have either all their children or none."""
    trees = []
    for all_children in (False, True):
        head = random_block(small, 2, causal=True, all_children=all_children)
        with torch.no_grad():
            head.norm.weight.mul_(4)  # one child is much likelier than the others
        small.add_drafter(DFlashDrafter(head))
        config = {**TREE, "num_draft_tokens": 13}
        trees.append([(tokens, parents) for _, tokens, parents in steps_of(small, 1, **config)[0]])
    for _, parents in trees[1]:
        assert {parents.count(node) for node in range(len(parents))} == {0, 3}
    assert trees[0] != trees[1]


# ------------------------------------------------------------------------------------------------------ depth


def test_a_shallow_tree_of_a_causal_head_begins_a_deeper_one(small: Any) -> None:
    """All paths of a causal block with fewer slots are those of the deeper tree; another head runs another block."""
    for causal in (True, False):
        head = random_block(small, 4, causal=causal)
        small.add_drafter(DFlashDrafter(head))
        equal = []
        steps = steps_of(small, 1, method="dflash", num_steps=2, top_k=2, num_draft_tokens=64)[0]
        for text, tokens, parents in steps:
            assert len(tokens) == 7
            whole = grow_block(outputs_after(small, head, text), reachable(Budget(64, 4, 2)))
            found = {path for path in paths_of(whole.tree, 0) if len(path) <= 2}
            assert len(found) == 6
            short = grow_block(outputs_after(small, head, text, 3), reachable(Budget(64, 2, 2)))
            assert (tokens, parents) == (short.tree.tokens[0].tolist(), short.tree.parents[0].tolist())
            equal.append(found == set(paths_of(short.tree, 0)))
        assert all(equal) is causal


def test_one_forward_drafts_all_levels(small: Any) -> None:
    small.add_drafter(DFlashDrafter(random_block(small)))
    assert small.drafters["dflash"].head.num_forwards(4) == 1
    calls: list[int] = []
    small.drafters["dflash"].head.register_forward_pre_hook(lambda _m, inputs: calls.append(inputs[0].shape[1]))
    generate(small, speculative=TREE)
    stats = small.last_speculation
    assert set(calls) == {5}
    assert len(calls) in (stats.num_target_forwards, stats.num_target_forwards - 1)  # the last one may be plain


# ------------------------------------------------------------------------------------------------------ confidence

CONFIDENT: dict[str, Any] = {"sample_from_anchor": True, "markov_rank": 4, "confidence_head": True,
                             "confidence_with_markov": True}  # fmt: skip


@pytest.mark.parametrize("fields", [CONFIDENT, {"confidence_head": True}], ids=["dspark", "alone"])
def test_nodes_behind_the_first_unconfident_token_are_dropped(small: Any, fields: dict[str, Any]) -> None:
    head, threshold = random_block(small, 6, **fields), 0.5
    with torch.no_grad():
        head.confidence_head.proj.bias.fill_(1.0)
    small.add_drafter(DFlashDrafter(head, confidence_threshold=threshold))
    plain = generate(small, 3)
    together, depths = steps_of(small, 3, plain, **TREE), set()
    limits = DFlashDrafter(head).limits(SpeculativeConfig(**TREE))
    for steps in together:
        for text, tokens, parents in steps:
            outputs = outputs_after(small, head, text)
            chain = corrected(outputs)[1]
            previous = torch.cat([outputs.roots, chain[:-1]])
            confident = head.confidence(outputs.hidden[0], previous).sigmoid() >= threshold
            depth = int(confident.int().cumprod(0).sum())
            whole = grow_block(outputs, limits)
            kept = [path for path in paths_of(whole.tree, 0) if len(path) <= depth]
            nodes = [node for node in range(1, len(tokens)) if parents[node] >= 0]
            paths: dict[int, tuple[int, ...]] = {0: ()}
            for node in nodes:
                paths[node] = (*paths[parents[node]], tokens[node])
            assert [paths[node] for node in nodes] == kept
            depths.add(depth)
    assert len(depths) > 2
    assert torch.equal(plain, generate(small, 3, speculative={"method": "dflash", "tree": CHOICES}))


def test_thresholds_of_nothing_and_of_everything(small: Any) -> None:
    head = random_block(small, 6, **CONFIDENT)
    plain = generate(small, 3)
    small.add_drafter(DFlashDrafter(head, confidence_threshold=1.0))
    assert torch.equal(plain, generate(small, 3, speculative=TREE))
    assert small.last_speculation.num_drafted_tokens == 0
    assert small.last_speculation.mean_accepted_length == 1
    small.add_drafter(DFlashDrafter(head))
    kept = steps_of(small, 3, **TREE)
    small.add_drafter(DFlashDrafter(head, confidence_threshold=1e-9))
    assert kept == steps_of(small, 3, **TREE)


def test_thresholds_that_are_refused(small: Any) -> None:
    for threshold in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidConfigError, match="must be from 0 to 1, got"):
            DFlashDrafter(random_block(small, **CONFIDENT), confidence_threshold=threshold)
    with pytest.raises(InvalidConfigError, match=r"must be 0, got 0\.5: this head has no confidence head"):
        DFlashDrafter(random_block(small), confidence_threshold=0.5)
    assert DFlashDrafter(random_block(small), 0.0).confidence_threshold == 0


# ------------------------------------------------------------------------------------------------------ answers

HEADS = ["dflash", "jetspec", "window", "rnn", "dflash2", "lilicorr", "own parts"]


@pytest.mark.parametrize("variant", HEADS)
def test_caches_from_the_call_before_are_continued(small: Any, variant: str) -> None:
    """The head has no features of the cached tokens."""
    small.add_drafter(DFlashDrafter(random_block(small, **VARIANTS[variant])))
    ids, _ = prompts(1)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    answers = []
    for speculative in (None, TREE, CHAIN):
        first = small.generate(ids, attention_mask=torch.ones_like(ids), speculative=speculative, **options)
        text = torch.cat([first.sequences, ids[:, :3]], dim=-1)
        given = {CACHE_FIELD: first[CACHE_FIELD], "attention_mask": torch.ones_like(text), **options}
        answers.append(small.generate(text, speculative=speculative, **given).sequences)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("variant", HEADS)
def test_prompts_of_embeddings_and_of_one_token(small: Any, variant: str) -> None:
    small.add_drafter(DFlashDrafter(random_block(small, **VARIANTS[variant])))
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    padded = prompts(3)
    for ids, mask in (
        padded,
        *((ids, torch.ones_like(ids)) for ids in (prompts(1)[0], torch.tensor([[7]]), torch.tensor([[7], [9]]))),
    ):
        given: dict[str, Any] = {**options, "attention_mask": mask}
        plain = small.generate(ids, **given)
        assert torch.equal(plain, small.generate(ids, speculative=TREE, **given))
        assert small.last_speculation.num_drafted_tokens > 0
        embeddings = small.get_input_embeddings()(ids)
        plain = small.generate(inputs_embeds=embeddings, **given)
        assert torch.equal(plain, small.generate(inputs_embeds=embeddings, speculative=TREE, **given))
        assert small.last_speculation.num_drafted_tokens > 0


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("variant", "method"), [("dflash", "auto"), ("rnn", "hybrid")])
def test_merged_with_other_drafts(small: Any, variant: str, method: str, batch_size: int) -> None:
    small.add_drafter(DFlashDrafter(random_block(small, **VARIANTS[variant])))
    plain = generate(small, batch_size, max_new_tokens=30)
    for adaptive in (None, False):  # whether it is queried at all depends on measured speed, unless the size is fixed
        config = {"method": method, "adaptive": adaptive}
        assert torch.equal(plain, generate(small, batch_size, max_new_tokens=30, speculative=config))
    assert small.last_speculation.control["queries"]["dflash"] > 0


# ------------------------------------------------------------------------------------------------------ loading


def test_heads_of_other_targets_are_refused(llama: Any, tmp_path: Path) -> None:
    for fields, message in (
        ({"hidden_size": 64}, "hidden_size 64"),
        ({"vocab_size": 97}, "vocab_size 97"),
        ({"aux_hidden_state_layer_ids": [1, 9]}, r"hidden states 0 to 4, the head reads \[1, 9\]"),
    ):
        head = DFlashHead(DFlashConfig.for_target(llama.config, **{"aux_hidden_state_layer_ids": [1], **fields}))
        head.save_pretrained(tmp_path / "head")
        for load in (lambda head=head: llama.add_drafter(DFlashDrafter(head)),
                     lambda: llama.load_drafter(tmp_path / "head")):  # fmt: skip
            with pytest.raises(DrafterMismatchError, match=message):
                load()
    assert llama.drafters == {}


def test_layers_that_occur_twice_and_layers_by_default(small: Any, llama: Any) -> None:
    small.add_drafter(DFlashDrafter(random_block(small, aux_hidden_state_layer_ids=[2, 1, 2, -1, 0, 0])))
    assert torch.equal(generate(small, 3), generate(small, 3, speculative=TREE))
    head = DFlashHead(DFlashConfig.for_target(llama.config, num_hidden_layers=3))
    with pytest.raises(InvalidConfigError, match="are not known yet"):
        _ = head.feature_layers
    llama.add_drafter(DFlashDrafter(head))
    assert head.feature_layers == tuple(default_layers(4, 3))
    assert head.config.num_target_layers == 4
    assert torch.equal(generate(llama, 3), generate(llama, 3, speculative="dflash"))
    assert default_layers(36, 5) == [2, 10, 18, 26, 34]
    assert default_layers(28, 1) == [15]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 1}, "drafts no tokens"),
        ({"layer_types": ["full_attention"]}, "for each of 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "`sliding_window` is not set"),
        ({"layer_types": ["chunked_attention"] * 2}, "each one of 'full_attention', 'sliding_attention'"),
        ({"mask_token_id": 96}, "outside the vocabulary of 96"),
        ({"markov_rank": 2, "markov_head_type": "lstm"}, "`markov_head_type` must be one of"),
        ({**LILICORR, "lilicorr_num_heads": 3}, "must divide the hidden size 16"),
        ({**LILICORR, **DFLASH2}, "not both"),
        ({**DOMINO, "gru_hidden_dim": 0}, "`gru_hidden_dim` must be set for"),
        ({"gru_hidden_dim": 4}, "`gru_hidden_dim` must be set for"),
        ({**DOMINO, "confidence_head": True}, "confidence head .DSpark. or a Markov head of type 'domino'"),
        ({"selector_rank": 2, "selector_top_k": 2, "markov_rank": 2}, "have no Markov head"),
        ({"confidence_with_markov": True, "confidence_head": True}, "needs `confidence_head` and a `markov_rank`"),
        ({"confidence_with_markov": True, "markov_rank": 2}, "needs `confidence_head` and a `markov_rank`"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        DFlashHead(DFlashConfig.for_target(zoo.build("llama").config, **fields))


def test_parts_that_equal_the_targets_are_dropped(small: Any, tmp_path: Path) -> None:
    """The embedding and the lm_head, as in files that hold both."""
    head = random_block(small, own_embedding=True, own_lm_head=True)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(small.get_input_embeddings().weight)
        head.lm_head.weight.copy_(small.lm_head.weight)
    head.save_pretrained(tmp_path / "head")
    loaded = small.load_drafter(tmp_path / "head").head
    assert not loaded.config.own_embedding
    assert not loaded.config.own_lm_head
    assert loaded.shares_lm_head
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(loaded.state_dict())
    assert torch.equal(generate(small, 3), generate(small, 3, speculative=TREE))
    loaded.save_pretrained(tmp_path / "again")
    assert isinstance(load_head(tmp_path / "again"), DFlashHead)
    other = random_block(small, own_embedding=True, own_lm_head=True)
    small.add_drafter(DFlashDrafter(other))
    assert other.config.own_embedding
    assert other.config.own_lm_head


def test_the_example_of_the_docs(small: Any, tmp_path: Path) -> None:
    """Saved heads stand for the published ones."""
    page = (Path(__file__).parents[1] / "docs" / "methods" / "dflash.md").read_text()
    code = (
        page.split("<!-- dflash -->\n```python\n")[1].split("```")[0].replace("max_new_tokens=64", "max_new_tokens=9")
    )
    for name, fields in (("z-lab/Qwen3-4B-DFlash-b16", {}), ("deepseek-ai/dspark_qwen3_4b_block7", CONFIDENT)):
        random_block(small, **fields).save_pretrained(tmp_path / name)
        assert name in code
        code = code.replace(name, str(tmp_path / name))
    exec(code, {"model": small, "inputs": {"input_ids": prompts(1)[0]}})
    assert list(small.drafters) == ["dflash", "confident"]
    assert small.drafters["confident"].confidence_threshold == 0.4


# ------------------------------------------------------------------------------------------------------ compiled


def without_inductor(graph: Any, _inputs: Any, options: Any) -> Any:
    return graph.forward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "form"),
    [
        ("causal window", "traced"),
        ("own parts", "traced"),
        ("dflash2", "traced"),
        ("lilicorr", "traced"),
        ("domino", "traced"),
        pytest.param("rnn", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_head_drafts_the_same(small: Any, variant: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and target as traced operations, run without inductor; and the head alone with it."""
    if form == "traced":
        monkeypatch.setattr(torch._inductor, "compile", without_inductor)
    drafter = DFlashDrafter(random_block(small, 3, **VARIANTS[variant]))
    small.add_drafter(drafter)
    plain = generate(small, 3)
    wanted = steps_of(small, 3, plain, **TREE)
    if form == "traced":
        assert wanted == steps_of(small, 3, plain, **TREE, compile="inductor")
        return
    other = drafter.compiled(small, "inductor")
    assert other.program is not None
    small.add_drafter(other)
    assert wanted == steps_of(small, 3, plain, **TREE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_kernel_grows_the_same_trees(small: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.load_or_none() is None:
        pytest.skip("this machine cannot use the CPU kernels")
    monkeypatch.setattr(torch._inductor, "compile", without_inductor)
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(len(arguments[1]))
        return grow_corrected(*arguments)

    monkeypatch.setattr(dflash, "grow_corrected", counted)
    drafter = DFlashDrafter(random_block(small, 3, **VARIANTS[kind]))
    small.add_drafter(drafter)
    plain = generate(small, 3)
    wanted = steps_of(small, 3, plain, **TREE)
    assert not calls
    small.add_drafter(drafter.compiled(small, "inductor"))
    assert wanted == steps_of(small, 3, plain, **TREE)
    assert set(calls) == {3}
