"""The trainers: what they see, what they optimise, that a head learns what it is shown, and that a run resumes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save
from transformers import AutoModelForCausalLM

import zoo
from drafters import EagleFamily as Head
from drafters import random_block, random_head, random_heads
from hf_specdec import Eagle3Head, InvalidConfigError, MedusaConfig, MedusaHeads
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.heads import attention
from hf_specdec.heads.attention import AlignedAttention
from hf_specdec.training import (
    Conversation,
    DFlashTrainingConfig,
    EagleTrainingConfig,
    FeatureStore,
    Medusa2TrainingConfig,
    MedusaTrainingConfig,
    capture_features,
    drop_near_duplicates,
    feature_bytes,
    feature_store,
    head_arguments,
    hold_out,
    most_frequent_tokens,
    openings,
    predicted_tau,
    search_tree,
    start_from_target,
    train_dflash,
    train_eagle,
    train_medusa,
)
from hf_specdec.training.block_objective import DFlashObjective
from hf_specdec.training.eagle_objective import EagleObjective
from hf_specdec.training.feature_store import collate
from hf_specdec.training.medusa_objectives import MedusaObjective
from hf_specdec.training.objectives import HeadLoss, grown
from hf_specdec.training.run_setup import last_checkpoint
from hf_specdec.training.trainer import HeadTrainer, estimate_run, num_steps_of
from hf_specdec.verification.features import LAST
from trained import TALKS, answered, arguments, batch_of

OBJECTIVES: dict[str, Any] = {
    "eagle": lambda head, model: EagleObjective(head, model, EagleTrainingConfig()),
    "medusa": lambda heads, model: MedusaObjective(heads, model, MedusaTrainingConfig()),
    "dflash": lambda head, model: DFlashObjective(head, model, DFlashTrainingConfig()),
}


def new_run(kind: str, model: Any, answer_tokens: int = 0, **fields: Any) -> tuple[Any, Any, Any]:
    """A trainer, a head that draws at random while it learns, and its settings."""
    if kind == "medusa":
        return train_medusa, random_heads(model, **fields), MedusaTrainingConfig(answer_tokens=answer_tokens)
    if kind == "dflash":
        head: Any = random_block(model, sample_from_anchor=True, markov_rank=4, confidence_head=True, **fields)
        return train_dflash, head, DFlashTrainingConfig(anchors=3, answer_tokens=answer_tokens)
    head = random_head(model, version=3 if kind == "eagle3" else 1, **fields)
    noise = 0.0 if answer_tokens else 0.1
    return train_eagle, head, EagleTrainingConfig(0.0, 1.0, noise=noise, answer_tokens=answer_tokens)


# ------------------------------------------------------------------------------------------------------ features


def test_features_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    model = zoo.build("llama")
    together = capture_features(model, TALKS, tmp_path / "all", layers=(0, 2, LAST), batch_size=2)
    assert together.lengths == [7, 5, 3]
    for item in together:
        talk = next(talk for talk in TALKS if list(talk.input_ids) == item["input_ids"].tolist())
        assert item["loss_mask"].tolist() == list(talk.loss_mask)
        ids = item["input_ids"][None]
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        wanted = torch.cat([states[0], states[2], states[-1]], dim=-1)[0]
        torch.testing.assert_close(item["features"], wanted, atol=1e-5, rtol=1e-5)


def test_capturing_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    whole = capture_features(model, TALKS, tmp_path / "whole", batch_size=1)
    with monkeypatch.context() as patch:
        calls: list[int] = []

        def stop(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return original(*args)

        original = feature_store.target_features
        patch.setattr("hf_specdec.training.feature_store.target_features", stop)
        with pytest.raises(KeyboardInterrupt):
            capture_features(model.train(), TALKS, tmp_path / "cut", batch_size=1)
        assert all(module.training for module in model.modules())
    with pytest.raises(InvalidConfigError, match="2 of 3 parts are missing"):
        FeatureStore(tmp_path / "cut")
    again = capture_features(model, TALKS, tmp_path / "cut", batch_size=1)
    for one, other in zip(whole, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_features_that_cannot_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")
    assert feature_bytes(model, TALKS, (1, LAST)) == 15 * (2 * 32 * 4 + 9)
    with pytest.raises(InvalidConfigError, match="end with -1"):
        capture_features(model, TALKS, tmp_path, layers=(1,))
    capture_features(model, TALKS, tmp_path / "made")
    with pytest.raises(InvalidConfigError, match="other conversations"):
        capture_features(model, TALKS[:2], tmp_path / "made")
    with pytest.raises(InvalidConfigError, match="other conversations"):  # of the same lengths
        capture_features(model, [Conversation(t.input_ids[::-1], t.loss_mask) for t in TALKS], tmp_path / "made")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").touch()
    with pytest.raises(InvalidConfigError, match="is not empty"):
        capture_features(model, TALKS, tmp_path / "else")
    with pytest.raises(InvalidConfigError, match="no captured features"):
        FeatureStore(tmp_path / "else")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100})())
    with pytest.raises(InvalidConfigError, match="GB free"):
        capture_features(model, TALKS, tmp_path / "full")


def test_captured_features_of_more_layers_serve_those_who_need_fewer(tmp_path: Path) -> None:
    model = zoo.build("llama")
    store = capture_features(model, TALKS, tmp_path / "made", layers=(1, LAST))
    again = capture_features(model, TALKS, tmp_path / "made")  # LAST alone
    assert again.layers == store.layers == (1, LAST)
    (tmp_path / "made" / "part-00000.safetensors").unlink()
    resumed = capture_features(model, TALKS, tmp_path / "made")  # what is missing gets all layers of the others
    assert torch.equal(resumed[0]["features"], store[0]["features"])
    with pytest.raises(InvalidConfigError, match=r"holds the layers \[1, -1\], not \[0, 1, -1\]"):
        capture_features(model, TALKS, tmp_path / "made", layers=(0, 1, LAST))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("eagle", {}),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 2]}),
        ("dflash", {"aux_hidden_state_layer_ids": [1, 2]}),
        ("dflash", {"aux_hidden_state_layer_ids": [2, 0, 2]}),
        ("dflash", {"aux_hidden_state_layer_ids": [-1, 1]}),
    ],
    ids=str,
)
def test_captured_features_give_the_same_weights(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """One store serves every head whose layers it has, also for the openings of answers."""
    model = zoo.build("llama")
    talks = sorted(TALKS, key=lambda talk: -len(talk.input_ids))
    stored = [capture_features(model, talks, tmp_path / str(n), layers=layers) for n, layers in enumerate(
        [(0, 1, 2, LAST), (3, LAST)])]  # fmt: skip
    trained = []
    for data in (stored[0], talks):
        train, head, config = new_run(kind, model, answer_tokens=2, **fields)
        train(model, head, data, arguments(tmp_path / "run", 2), config)
        trained.append(head.fc.weight.detach().clone())
    torch.testing.assert_close(*trained, atol=1e-5, rtol=1e-4)
    if kind != "eagle":
        with pytest.raises(InvalidConfigError, match=r"\[3, -1\] were captured, but this head reads \["):
            train(model, head, stored[1], arguments(tmp_path / "run", 1), config)


def test_openings_of_captured_features_are_those_of_their_conversations(tmp_path: Path) -> None:
    model = zoo.build("llama")
    store, talks = capture_features(model, TALKS, tmp_path / "store"), openings(TALKS, 2)
    cut = openings(store, 2)
    assert isinstance(cut, FeatureStore)
    assert sorted(cut.lengths) == sorted(len(talk.input_ids) for talk in talks) != sorted(store.lengths)
    for index, length in enumerate(cut.lengths):
        item, whole = cut[index], store[index]
        assert [len(item[name]) for name in ("input_ids", "loss_mask", "features")] == [length] * 3
        assert torch.equal(item["features"], whole["features"][:length])
        assert int(item["loss_mask"].sum()) == min(2, int(whole["loss_mask"].sum()))
    assert openings(store, 0) is store


def test_the_opening_of_a_conversation() -> None:
    two_turns = Conversation((5, 6, 7, 8, 9, 1, 2, 3, 4), (False, True, True, True, True, False, True, True, False))
    assert two_turns.opening(2) == Conversation(
        (5, 6, 7, 8, 9, 1, 2, 3), (False, True, True, False, False, False, True, True)
    )
    assert two_turns.opening(1).loss_mask == (False, True, False, False, False, False, True)
    assert two_turns.opening(9) == Conversation(two_turns.input_ids[:8], two_turns.loss_mask[:8])
    nobody_answers = Conversation((5, 6), (False, False))
    assert nobody_answers.opening(3) == nobody_answers


# ------------------------------------------------------------------------------------------------------ EAGLE


@pytest.mark.parametrize("block", [256, 3])
@pytest.mark.parametrize("version", [1, 3, "mtp"])
def test_aligned_steps_see_what_drafting_sees(version: int | str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step j of training at entry t equals drafting j levels below entry t-j, computed for that entry alone."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    model = zoo.build("llama")
    head = random_head(model, version=version).eval()
    length, steps = 8, 4
    embeddings, hidden = torch.randn(1, length, 32), torch.randn(1, length, 32)
    positions = torch.arange(length)[None]
    attend, seen, trained = AlignedAttention(), hidden, []
    with torch.no_grad():
        for _ in range(steps):
            trained.append(head(embeddings, seen, positions, attend))
            seen = torch.cat([hidden[:, :1], trained[-1][:, :-1]], dim=1)
        for begin in range(length - steps + 1):
            known = hidden[:, : begin + 1]
            for step in range(steps):
                width = known.shape[1]
                out = head(embeddings[:, :width], known, positions[:, :width])
                torch.testing.assert_close(out[:, -1], trained[step][:, begin + step], atol=1e-4, rtol=1e-4)
                known = torch.cat([known, out[:, -1:]], dim=1)


def slow_eagle_loss(
    model: Any, head: Head, talk: Conversation, config: EagleTrainingConfig
) -> tuple[Tensor, list[Any]]:
    """The loss by definition: every drafted node of every place of one conversation, each computed alone."""
    ids = torch.tensor([talk.input_ids])
    states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    known = head.fuse(torch.cat([states[layer] for layer in head.feature_layers], dim=-1))
    hot = head.hot_token_ids if head.hot_token_ids is not None else torch.arange(zoo.VOCAB_SIZE)
    rows, right = model.lm_head.weight[hot], []
    total = torch.zeros(())
    # roots from which all was right so far, and from which the text is what the target would have said
    sure, greedy = set(range(1, len(talk.input_ids))), set(range(1, len(talk.input_ids)))
    for step in range(config.aligned_steps):
        losses, agreed, chains, followed = [], [], set(), set()
        for root in range(1, len(talk.input_ids)):
            last = root + step + 1  # the token that this step's node is to say
            if last >= len(talk.input_ids) or not all(talk.loss_mask[root : last + 1]):
                continue
            hidden = known[:, :root]
            for depth in range(step + 1):
                embedded = head.embedding_for(model)(ids[:, 1 : root + depth + 1])
                output = head(embedded, hidden, torch.arange(root + depth)[None])
                hidden = torch.cat([hidden, output[:, -1:]], dim=1)
            wanted = states[-1][0, last - 1]
            probs = (rows @ wanted).softmax(-1)
            if not config.soft_tokens:
                probs = (torch.arange(len(rows)) == (rows @ wanted).argmax()).float()
            logits = head.score(hidden[0, -1], rows.matmul)
            loss = -config.token_weight * (probs * logits.log_softmax(-1)).sum()
            if config.feature_weight:
                loss = loss + config.feature_weight * torch.nn.functional.smooth_l1_loss(hidden[0, -1], wanted)
            losses.append(loss)
            chosen = int((model.lm_head.weight @ wanted).argmax())
            agreed.append(int(hot[logits.argmax()]) == chosen)
            sure -= set() if agreed[-1] else {root}
            chains |= {root} & greedy
            followed |= {root} if talk.input_ids[last] == chosen else set()
        right.append((sum(agreed), len(agreed), len(chains & sure), len(chains)))
        greedy &= chains & followed
        total = total + config.step_decay**step * sum(losses) / max(len(losses), 1)
    return total, right


OTHER_WIDTH = {"version": 3, "own_embedding": True, "target_hidden_size": 32, "hidden_size": 24,
               "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"draft_vocab_size": 50},
        {"version": 3, "draft_vocab_size": 50},
        {"layernorms": True},
        OTHER_WIDTH,
        {"version": "mtp"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("soft_tokens", "block"), [(True, 256), (False, 3)])
def test_the_eagle_loss_is_its_definition(
    fields: dict[str, Any], soft_tokens: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several turns in one conversation, padding in the batch, gradients included; attention at once, or in blocks."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    model = zoo.build("llama")
    begin = torch.randint(3, zoo.VOCAB_SIZE, (1, 3), generator=torch.Generator().manual_seed(3))
    ids = model.generate(begin, attention_mask=torch.ones_like(begin), max_new_tokens=13, do_sample=False)[0].tolist()
    ids[9] = 7 if ids[9] != 7 else 8
    mask = [False, False, True, True, True, True, False, False, True, True, True, True, True, False, False, True]
    talk = Conversation(tuple(ids), tuple(mask))
    head = random_head(model, **fields)
    version = fields.get("version", 1)
    config = EagleTrainingConfig(
        1.0 if version == 1 else 0.0, 0.3, noise=0.0, aligned_steps=3, soft_tokens=soft_tokens
    )
    objective = EagleObjective(head, model, config)
    states = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    seen = torch.cat([states[layer] for layer in objective.layers], dim=-1)[0].detach()
    rows = [{"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask), "features": seen}]
    outputs: HeadLoss = objective(**collate(rows), measure=1)
    wanted, right = slow_eagle_loss(model, head, talk, config)
    torch.testing.assert_close(outputs.loss, wanted, atol=1e-5, rtol=1e-5)
    assert outputs.counts is not None
    counts = outputs.counts
    each = (counts.right[:, 0], counts.counted, counts.accepted, counts.chains)
    assert list(zip(*(tensor.tolist() for tensor in each), strict=True)) == right
    assert right[1][1] > right[1][3] > 0  # some of the text is what the target would have said, and some is not
    first: Any = head.eh_proj if version == "mtp" else head.fc
    gradients = [torch.autograd.grad(loss, first.weight)[0] for loss in (outputs.loss, wanted)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    # a shorter row beside it changes its share of the mean, and padding nothing
    pair = collate([*rows, {name: value[:2] for name, value in rows[0].items()}])
    torch.testing.assert_close(objective(**pair).loss, outputs.loss)


@pytest.mark.parametrize(
    ("name", "fields", "misfits"),
    [
        ("llama", {}, ()),
        ("qwen2", {}, ()),  # the head has no biases
        ("qwen3", {"qk_norm": True}, ()),
        ("qwen3", {}, ("attention",)),
        ("gemma", {}, ("MLP",)),  # another activation
        ("gemma", {"hidden_act": "gelu_pytorch_tanh"}, ()),  # norms of another notation
        ("gpt2", {}, ("lm_head", "MLP", "attention")),
    ],
)
def test_a_head_starts_from_what_its_target_has(name: str, fields: dict[str, Any], misfits: tuple[str, ...]) -> None:
    model: Any = copy.deepcopy(zoo.build(name))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter))
    head = random_head(model, version=3, draft_vocab_size=40, **fields)
    before = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    assert start_from_target(head, model) == misfits
    if misfits:
        assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())
        return
    own, hidden, last = head.midlayer, torch.randn(3, 32), model.model.layers[-2]
    torch.testing.assert_close(head.lm_head.weight.detach(), model.lm_head.weight[head.hot_token_ids])
    torch.testing.assert_close(head.norm(hidden), model.model.norm(hidden), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(own.mlp(hidden), last.mlp(hidden))
    torch.testing.assert_close(own.hidden_norm(hidden), last.input_layernorm(hidden), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(own.self_attn.q_proj.weight[:, 32:].detach(), last.self_attn.q_proj.weight)
    assert torch.equal(own.self_attn.q_proj.weight[:, :32], before["midlayer.self_attn.q_proj.weight"][:, :32])


# ------------------------------------------------------------------------------------------------------ Medusa


@pytest.mark.parametrize("soft_labels", [True, False])
@pytest.mark.parametrize("fields", [{}, {"shared_lm_head": False, "draft_vocab_size": 60}], ids=str)
def test_the_medusa_loss_is_its_definition(fields: dict[str, Any], soft_labels: bool) -> None:
    model = zoo.build("llama")
    torch.manual_seed(0)
    heads = MedusaHeads(MedusaConfig.for_target(model.config, medusa_num_heads=3, **fields))
    if heads.config.draft_vocab_size:
        heads.set_hot_token_ids(torch.randperm(zoo.VOCAB_SIZE)[:60].sort().values)
    heads.start_from(model.lm_head)
    ids = torch.randint(3, zoo.VOCAB_SIZE, (9,), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 1]).bool()
    states = model(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states[-1][0].detach()
    objective = MedusaObjective(heads, model, MedusaTrainingConfig(head_decay=0.5, soft_labels=soft_labels))
    outputs: HeadLoss = objective(**collate([{"input_ids": ids, "loss_mask": mask, "features": states}]), measure=1)
    hot = heads.hot_token_ids if heads.hot_token_ids is not None else torch.arange(zoo.VOCAB_SIZE)
    total, counts = torch.zeros(()), []
    for head in range(3):
        losses, count = [], 0
        for place in range(len(ids)):
            if place + 2 + head < len(ids) and mask[place + 2 + head]:
                count += 1
                said = heads(states[place], model.lm_head if heads.hot_token_ids is None else None)[head].log_softmax(
                    -1
                )
                truth = (model.lm_head.weight[hot] @ states[place + 1 + head]).softmax(-1)
                if not soft_labels:
                    truth = (hot == ids[place + 2 + head]).float()
                losses.append(-(truth * said).sum())
        counts.append(count)
        total = total + 0.5**head * sum(losses) / count
    assert outputs.counts is not None
    assert outputs.counts.counted.tolist() == counts
    torch.testing.assert_close(outputs.loss, total, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_aligned_steps_grow_over_a_share_of_the_run(llama: Any, tmp_path: Path) -> None:
    assert [grown(3, tenth / 10, 0.5) for tenth in range(11)] == [1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3]
    assert [grown(3, share, 0.0) for share in (0.0, 1.0)] == [3, 3]
    _, _, talks = answered(llama, 4, 12)
    head = random_head(llama, version=3)
    config = EagleTrainingConfig.for_head(head).changed(aligned_steps=3, growing=0.5)
    options = arguments(tmp_path, 8, learning_rate=1e-3, per_device_train_batch_size=4, logging_steps=1)
    train_eagle(llama, head, talks, options, config)
    rows = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    depths = [sum(name.startswith("top1_accuracy") for name in row) for row in rows if "loss" in row]
    assert depths == [1, 1, 2, 2, 3, 3, 3, 3]


# ------------------------------------------------------------------------------------------------------ measuring


def test_data_are_chosen() -> None:
    talks = [Conversation.of([5], [number]) for number in range(6)]
    assert hold_out(talks, 2) == ([talks[place] for place in (0, 1, 3, 4)], [talks[2], talks[5]])
    assert hold_out(talks, 0) == (talks, [])
    assert hold_out(talks, 9) == ([], talks)
    assert hold_out([*talks, talks[5]], 1) == (talks[:5], [talks[5]])  # no copy of it is trained on
    assert most_frequent_tokens([Conversation.of([1], [7, 7, 9])], 3).tolist() == [0, 7, 9]
    assert most_frequent_tokens([Conversation.of([1], [7, 7, 9, 9, 9, 4])], 2).tolist() == [7, 9]


def test_what_was_said_before_is_left_out() -> None:
    """Alone the first of its kind stays; what goes round in itself is left out as well; prompts do not count."""
    said = list(range(10, 30))
    first, again = Conversation.of([5], said), Conversation.of([6, 7], said)
    half = Conversation.of([5], [*said[:13], *range(40, 49)])  # of 15 runs 6 were said before
    round_and_round = Conversation.of([5], [60, 61] * 10)  # of 13 runs two are new
    short = Conversation.of(said, [70, 71])
    talks = [first, again, half, round_and_round, short]
    assert drop_near_duplicates(talks, 0.5) == [first, half, short]
    assert drop_near_duplicates(talks, 0.3) == [first, short]
    assert drop_near_duplicates(talks, 0.9) == [first, half, round_and_round, short]
    assert drop_near_duplicates(talks, 1.0) == talks
    assert drop_near_duplicates(talks, 0.5, [again]) == [half, short]


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
def test_the_best_head_on_what_is_held_out_is_kept(captured: bool, tmp_path: Path) -> None:
    """It is measured before each checkpoint, and the weights at the end are those of the best one."""
    model = zoo.build("llama")
    others = [Conversation.of([5, number], [8, 9, number, 11]) for number in range(30, 42)]
    data: list[Any] = [others, TALKS]
    if captured:
        data = [capture_features(model, talks, tmp_path / str(len(talks))) for talks in data]
    head = random_head(model, version=1)
    options = head_arguments(
        tmp_path / "run", {"save_steps": 2, "disable_tqdm": True, "logging_steps": 1}, held_out=True, max_steps=7,
        per_device_train_batch_size=4, learning_rate=0.5, seed=0,
    )  # fmt: skip
    train_eagle(model, head, data[0], options, EagleTrainingConfig(0.0, 1.0, noise=0.0), held_out=data[1])
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    rows = {row["step"]: row for row in state["log_history"] if "eval_tau" in row}
    assert sorted(rows) == [2, 4, 6, 7]
    best = max(rows, key=lambda step: (rows[step]["eval_tau"], -step))
    assert state["best_model_checkpoint"].endswith(f"checkpoint-{best}")
    objective = EagleObjective(head, model, EagleTrainingConfig(0.0, 1.0, noise=0.0)).eval()
    counts = objective(**batch_of(model, TALKS, objective.layers), measure=1).counts
    assert counts is not None
    assert rows[best]["eval_tau"] == pytest.approx(1 + sum(counts.acceptance))
    assert [rows[best][f"eval_accepted_{depth}"] for depth in range(1, 6)] == pytest.approx(counts.acceptance)
    assert head.config.tau == {"greedy chains on held-out conversations": round(rows[best]["eval_tau"], 2)}
    assert head.config.recipe["weights of step"] == best


def test_a_run_is_reckoned_before_it_starts(tmp_path: Path) -> None:
    """Steps and disk to the byte; the rehearsal leaves neither gradients nor draws behind."""
    options = arguments(
        tmp_path, -1, num_train_epochs=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        save_strategy="steps", save_steps=2, save_total_limit=2,
    )  # fmt: skip
    assert num_steps_of(options, 5) == 6  # three batches, two updates an epoch
    model = zoo.build("llama")
    for kind in ("eagle", "medusa", "dflash"):
        _, head, _ = new_run(kind, model)
        objective = OBJECTIVES[kind](head, model)
        trainer, before = HeadTrainer(objective, model, TALKS, options), torch.get_rng_state()
        found = estimate_run(trainer.rehearse, objective, [5, 7, 3], options, num_done=1)
        size = sum(parameter.numel() for parameter in head.parameters())
        assert (found.num_steps, found.disk_bytes) == (2, 2 * 12 * size)
        assert found.memory_bytes > 12 * size
        assert all(parameter.grad is None for parameter in head.parameters())
        assert torch.equal(torch.get_rng_state(), before)
    assert str(replace(found, seconds_per_step=3600.0)).startswith("2 steps of 3.6e+03 s: about 2 h 00 min; ")


# ------------------------------------------------------------------------------------------------------ the Trainer


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3", "medusa", "dflash"])
def test_training_resumes_exactly(kind: str, tmp_path: Path) -> None:
    """Six steps at once, and four, an interrupt, then the rest: the same weights and the same losses, bit by bit."""
    model = zoo.build("llama")
    talks = [*TALKS, *(Conversation.of([9], list(range(30, 50))) for _ in range(5))]
    runs = []
    for stops in ([6], [4, 6]):
        for stop in stops:
            train, head, config = new_run(kind, model)
            options = arguments(
                tmp_path / str(len(stops)), 6, save_strategy="steps", save_steps=2, logging_steps=1, warmup_steps=3,
                per_device_train_batch_size=2, gradient_accumulation_steps=2,
            )  # fmt: skip
            options.max_steps, options.lr_scheduler_type = stop, "constant_with_warmup"
            train(model, head, talks, options, config, resume=stop != stops[0])
        log = json.loads((Path(options.output_dir) / "trainer_state.json").read_text())["log_history"]
        runs.append((head.state_dict(), [row["loss"] for row in log if "loss" in row]))
    assert len(runs[0][1]) == 6
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(runs[0][0][name], runs[1][0][name]) for name in runs[0][0])


@pytest.mark.slow
def test_a_run_is_not_continued_with_other_data_or_settings(tmp_path: Path) -> None:
    model = zoo.build("llama")

    def train(talks: Any, recipe: EagleTrainingConfig, **fields: Any) -> Any:
        options = arguments(tmp_path, 2, save_strategy="steps", save_steps=2, per_device_train_batch_size=2)
        return train_eagle(model, random_head(model, version=1, **fields), talks, options, recipe, resume=True)

    recipe = EagleTrainingConfig(0.0, 1.0, noise=0.1)
    trained = train(TALKS, recipe)
    assert trained.config.recipe["optimiser steps"] == 2
    assert trained.config.recipe["objective"] == "EagleObjective"
    train(TALKS, recipe)
    for talks, other, fields, what in (
        (TALKS[1:], recipe, {}, "data.conversations was 3, is 2.*data.tokens was 15, is 10"),
        (TALKS, EagleTrainingConfig(0.0, 1.0, noise=0.2), {}, "settings.noise was 0.1, is 0.2"),
        (TALKS, recipe, {"draft_vocab_size": 50}, "head.draft_vocab_size was None, is 50"),
    ):
        with pytest.raises(InvalidConfigError, match=what):
            train(talks, other, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 3])
def test_a_quantised_target_is_a_target(version: int, tmp_path: Path) -> None:
    """int8 weights: features, teacher and start come from what the quantised model computes."""
    pytest.importorskip("optimum.quanto")
    zoo.build("llama").save_pretrained(tmp_path / "model")
    config = transformers.QuantoConfig(weights="int8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config)
    head = random_head(model, version=version, draft_vocab_size=50)
    if isinstance(head, Eagle3Head):
        start_from_target(head, model)
        hidden = torch.randn(3, 32)
        hot = head.hot_token_ids
        torch.testing.assert_close(head.lm_head(hidden), model.lm_head(hidden)[:, hot], atol=1e-4, rtol=1e-3)
    before = head.fc.weight.detach().clone()
    train_eagle(model, head, TALKS, arguments(tmp_path / "run", 2))
    assert not torch.equal(head.fc.weight, before)


@pytest.mark.slow
def test_a_head_in_shards_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP needs an accelerator; here its gathering is played: a new head with the trained weights comes back."""
    model = zoo.build("llama")

    def end_of_training(trainer: Any) -> None:
        trainer.is_fsdp_enabled = True
        trainer.accelerator.get_state_dict = lambda wrapped: {n: t.clone() for n, t in wrapped.state_dict().items()}

    monkeypatch.setattr(HeadTrainer, "save_state", end_of_training)
    head = random_head(model, version=3, draft_vocab_size=50)
    trained = train_eagle(model, head, TALKS, arguments(tmp_path, 2))
    assert trained is not head
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in trained.state_dict().items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # which torch 2.9 itself uses
@pytest.mark.parametrize("kind", ["full", "sharded", "local"])
def test_a_checkpoint_of_fsdp_is_checked_before_it_is_loaded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are those of accelerate; the names in the files of one process are unknown."""
    model, loaded = zoo.build("llama"), []
    objective = EagleObjective(random_head(model, version=1), model, EagleTrainingConfig(0.0, 1.0))
    trainer = HeadTrainer(objective, model, TALKS, arguments(tmp_path, 1))
    trainer.is_fsdp_enabled = True
    monkeypatch.setattr(
        transformers.Trainer, "_load_from_checkpoint", lambda _self, folder, _model: loaded.append(folder)
    )
    right = objective.state_dict()
    less = dict(list(right.items())[1:])
    for name, tensors in (("right", right), ("more", {**right, "head.other": torch.zeros(1)}), ("less", less)):
        folder = tmp_path / name
        folder.mkdir()
        if kind == "sharded":
            writer = FileSystemWriter(folder / "pytorch_model_fsdp_0")
            save({"model": tensors}, storage_writer=writer, no_dist=True)
        else:
            torch.save(tensors, folder / f"pytorch_model_fsdp{'_rank0' if kind == 'local' else ''}.bin")
        if name == "right" or kind == "local":
            trainer._load_from_checkpoint(str(folder), objective)
            assert loaded.pop() == str(folder)
        else:
            with pytest.raises(CheckpointFormatError, match="of another head"):
                trainer._load_from_checkpoint(str(folder), objective)
    assert not loaded


def test_a_data_seed_of_zero_is_a_seed(tmp_path: Path) -> None:
    model, seeds = zoo.build("llama"), []
    for data_seed in (0, 3, None):
        options = arguments(tmp_path, 1, train_sampling_strategy="group_by_length", data_seed=data_seed)
        options.seed = 7
        objective = EagleObjective(random_head(model, version=1), model, EagleTrainingConfig(0.0, 1.0))
        seeds.append(HeadTrainer(objective, model, TALKS, options)._get_train_sampler()._seed)  # type: ignore[union-attr]
    assert seeds == [0, 3, 7]


def test_half_written_checkpoints_are_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "nowhere") is None
    assert last_checkpoint(tmp_path) is None
    for step, state in ((2, '{"global_step": 2}'), (10, '{"global_step": 10}'), (12, '{"cut'), (14, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.slow
def test_the_log_tells_accuracies_and_tau(tmp_path: Path) -> None:
    model = zoo.build("llama")
    heads = MedusaHeads(MedusaConfig.for_target(model.config, medusa_num_heads=2))
    options = arguments(tmp_path, 4, logging_steps=2, train_sampling_strategy="group_by_length")
    train_medusa(model, heads, TALKS, options)
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    rows = [row for row in log if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        accuracies = [row["top1_accuracy_1"], row["top1_accuracy_2"]]
        assert row["predicted_tau"] == pytest.approx(1 + accuracies[0] + accuracies[0] * accuracies[1])
    assert predicted_tau([0.5, 0.4]) == pytest.approx(1.7)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (EagleTrainingConfig, {"nose": 1.0}, "no field 'nose'"),
        (EagleTrainingConfig, {"noise": "1"}, "a number from 0 to 1000000, got '1'"),
        (EagleTrainingConfig, {"noise": True}, "a number"),
        (EagleTrainingConfig, {"noise": -1}, "a number from 0"),
        (EagleTrainingConfig, {"noise": float("inf")}, "a number from 0"),
        (EagleTrainingConfig, {"answer_tokens": 2**70}, "an integer from 0"),
        (EagleTrainingConfig, {"aligned_steps": 0}, "an integer from 1 to 64"),
        (EagleTrainingConfig, {"aligned_steps": 2.0}, "an integer"),
        (EagleTrainingConfig, {"soft_tokens": 1}, "true or false"),
        (EagleTrainingConfig, {"growing": 1.5}, "a number from 0 to 1,"),
        (MedusaTrainingConfig, {"head_decay": 0.0}, "above 0 and at most 2"),
        (DFlashTrainingConfig, {"anchors": 0}, "an integer from 1"),
        (DFlashTrainingConfig, {"slot_decay": float("nan")}, "above 0"),
        (Medusa2TrainingConfig, {"head_weight": 0}, "above 0"),
        (Medusa2TrainingConfig, {"schedule": "cosine"}, "'constant' or 'sine'"),
    ],
)
def test_settings_that_are_refused(kind: Any, fields: dict[str, Any], reason: str) -> None:
    if kind is not Medusa2TrainingConfig:
        with pytest.raises(InvalidConfigError, match=reason):
            kind().changed(**fields)
    if "nose" not in fields:
        with pytest.raises(InvalidConfigError, match=reason):
            kind(**fields)


def test_heads_and_data_that_are_refused(tmp_path: Path) -> None:
    model = zoo.build("llama")
    assert EagleTrainingConfig().changed(noise=1, soft_tokens=False) == EagleTrainingConfig(noise=1, soft_tokens=False)
    windowed = random_block(model, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    runs: list[tuple[Any, Any, Any, Any, str]] = [
        (train_eagle, random_head(model, version=3), TALKS, EagleTrainingConfig(), "feature_weight=0"),
        (train_eagle, random_head(model), [], None, "no conversations"),
        (train_eagle, random_head(model, sliding_window=4), TALKS, None, "has a sliding window"),
        (train_dflash, windowed, TALKS, None, "has a sliding window.*layer_types=None"),
        (train_dflash, random_block(model), TALKS, DFlashTrainingConfig(growing=0.5), "needs a causal head"),
    ]
    for train, head, data, config, reason in runs:
        with pytest.raises(InvalidConfigError, match=reason):
            train(model, head, data, arguments(tmp_path, 1), config)
    with pytest.raises(InvalidConfigError, match="has a sliding window"):
        search_tree(model, windowed, TALKS, num_nodes=4)
    with pytest.raises(InvalidConfigError, match="one loss mask entry per token"):
        Conversation((1, 2), (True,))
