"""`hf-specdec train dflash` on a tiny saved model: from conversations to a head that drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from command_line import error_line, run
from hf_specdec import DFlashHead, EagleConfig, EagleHead, InvalidConfigError, SpeculativeGenerationMixin
from hf_specdec.cli.training_run import choose_mask_token
from hf_specdec.training import Conversation, FeatureStore
from test_cli_training import no_model, talks  # noqa: F401  (fixtures)

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]


def check_answers(saved: Path, head: Path) -> DFlashHead:
    """Load a head with `load_drafter`, compare answers with plain ones, and return it."""
    model: Any = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(saved))
    drafter = model.load_drafter(head)
    assert drafter.method == "dflash"
    ids = torch.tensor([[5, 6, 7], [10, 11, 12]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    for speculative in ("dflash", "auto"):
        assert torch.equal(plain, model.generate(ids, speculative=speculative, **options))
    loaded: DFlashHead = drafter.head
    return loaded


def test_from_conversations_to_a_head_that_drafts(
    saved: Path,
    talks: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Captured,
) -> None:
    """DSpark's parts on captured features, with held-out conversations; then a second run continues from it."""
    rows = [{"prompt_ids": [5, 6, number], "response_ids": [8, 9, number, 11, 12, 13]} for number in range(30, 54)]
    talks.write_text("\n".join(map(json.dumps, rows)))
    more, recipe = tmp_path / "more.json", tmp_path / "recipe.json"
    more.write_text(json.dumps({"logging_steps": 1, "save_steps": 2}))
    recipe.write_text(json.dumps({"answer_tokens": 3, "slot_decay": 2.0, "soft_weight": 0.5}))
    common = ["train", "dflash", "--model", saved, "--data", talks, "--features", tmp_path / "features",
              "--batch-size", 4, "--dtype", "float32", "--arguments", more, "--held-out", 3, "--json"]  # fmt: skip
    assert run(monkeypatch, *common, "--output", tmp_path / "first", "--max-steps", 4, "--block-size", 4,
               "--num-layers", 1, "--markov-rank", 4, "--confidence", "--draft-vocab-size", 60, "--anchors", 3,
               "--base-model-name", "org/target") == 0  # fmt: skip
    streams = capsys.readouterr()
    told = json.loads(streams.out.strip().splitlines()[-1])
    assert told["held_out_tau"] == pytest.approx(1 + sum(told[f"held_out_accepted_{depth}"] for depth in range(1, 5)))
    assert "The head starts from the last layers and the final norm of the target" in streams.err
    assert "GB of features" in streams.err
    assert (tmp_path / "first" / "training.png").stat().st_size > 1000
    assert len(FeatureStore(tmp_path / "features")) == 21
    head = check_answers(saved, tmp_path / "first")
    config = head.config
    assert (config.block_size, config.num_hidden_layers, config.draft_vocab_size) == (4, 1, 60)
    assert (config.markov_rank, config.sample_from_anchor, config.max_depth) == (4, True, 4)
    assert config.confidence_head
    assert config.confidence_with_markov
    assert not config.causal
    assert config.base_model_name_or_path == "org/target"
    assert config.recipe["anchors"] == 3
    assert config.mask_token_id == 95  # the last token that no conversation contains
    captured = {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.safetensors")}
    assert run(monkeypatch, *common, "--output", tmp_path / "second", "--max-steps", 2, "--initial-head",
               tmp_path / "first", "--recipe", recipe) == 0  # fmt: skip
    assert "The head starts from" not in capsys.readouterr().err
    assert captured == {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.safetensors")}
    after = check_answers(saved, tmp_path / "second")
    assert after.config.recipe["answer tokens"] == 3
    assert after.config.mask_token_id == 95
    assert any(not torch.equal(*pair) for pair in zip(head.parameters(), after.parameters(), strict=True))
    more.write_text(json.dumps({"save_steps": 2}))
    monkeypatch.setattr("hf_specdec.cli.training_run.load_target", None)
    assert run(monkeypatch, *common, "--output", tmp_path / "second", "--initial-head", tmp_path / "first") == 2
    assert "settings.answer_tokens was 3, is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ([], {"block_size": 8, "num_hidden_layers": 2, "causal": False, "markov_rank": 0, "mask_token_id": 95,
              "sample_from_anchor": False}),
        (["--causal", "--mask-token-id", 50, "--block-size", 3], {"causal": True, "mask_token_id": 50}),
        (["--markov-rank", 2, "--head-fields", {"markov_head_type": "rnn"}],
         {"markov_head_type": "rnn", "sample_from_anchor": True, "confidence_head": False}),
        (["--confidence", "--random-start"],
         {"confidence_head": True, "confidence_with_markov": False, "sample_from_anchor": False}),
        (["--head-fields", {"aux_hidden_state_layer_ids": [-1, 2, 2], "qk_norm": False}],
         {"aux_hidden_state_layer_ids": [-1, 2, 2], "qk_norm": False}),
    ],
    ids=str,
)  # fmt: skip
def test_every_variant(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured, options: list[Any],  # noqa: F811
    fields: dict[str, Any],
) -> None:  # fmt: skip
    (tmp_path / "fields.json").write_text(json.dumps(next((o for o in options if isinstance(o, dict)), {})))
    given = [tmp_path / "fields.json" if isinstance(option, dict) else option for option in options]
    features = ["--features", tmp_path / "features"] if "--head-fields" in given else []
    assert run(monkeypatch, "train", "dflash", *given, *features, "--model", saved, "--data", talks, "--output",
               tmp_path / "head", "--max-steps", 2, "--batch-size", 2, "--dtype", "float32") == 0  # fmt: skip
    streams = capsys.readouterr()
    assert ("The head starts from" in streams.err) is ("--random-start" not in options)
    head = check_answers(saved, tmp_path / "head")
    assert {name: getattr(head.config, name) for name in fields} == fields
    assert head.config.num_target_layers == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--initial-head", "HEAD", "--block-size", "4"], "block_size would be ignored"),
        (["--initial-head", "HEAD", "--markov-rank", "4"], "markov_rank, sample_from_anchor would be ignored"),
        (["--initial-head", "HEAD", "--causal", "--confidence"], "causal, confidence_head would be ignored"),
        (["--initial-head", "HEAD", "--mask-token-id", "3"], "mask_token_id would be ignored"),
        (["--initial-head", "HEAD", "--random-start"], "Drop one of them"),
        (["--initial-head", "EAGLE"], "must be a block head, got EagleHead"),
        (["--initial-head", "MODEL"], "not a head in a known layout"),
        (["--initial-head", "OTHER"], "needs a target with vocab_size 64"),
        (["--mask-token-id", "96"], "`mask_token_id` 96 is outside the vocabulary of 96"),
        (["--block-size", "1"], "block-size"),
        (["--block-size", "65"], "block-size"),
        (["--num-layers", "65"], "num-layers"),
        (["--anchors", "0"], "anchors"),
        (["--markov-rank", "-1"], "markov-rank"),
        (["--draft-vocab-size", "97"], "from 1 to the target's 96 tokens"),
        (["--head-fields", {"blocksize": 4}], "Did you mean 'block_size'"),
        (["--head-fields", {"markov_rank": 2, "markov_head_type": "lstm"}], "`markov_head_type` must be"),
        (["--head-fields", {"aux_hidden_state_layer_ids": [1, 5]}], "hidden states 0 to 4, the head reads [1, 5]"),
        (["--head-fields", {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}], "has a sliding window"),
        (["--recipe", {"anchor": 3}], "has no field 'anchor'"),
        (["--recipe", {"slot_decay": 0.0}], "slot_decay > 0"),
        (["--recipe", {"aligned_steps": 3}], "has no field 'aligned_steps'"),
        (["--arguments", {"learningrate": 1}], "training arguments are invalid"),
    ],
)
def test_mistakes_are_refused_before_the_target_is_loaded(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured, no_model: None,  # noqa: F811
    arguments: list[Any], message: str,
) -> None:  # fmt: skip
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    EagleHead(EagleConfig(vocab_size=96, **sizes)).save_pretrained(tmp_path / "eagle")
    for name, vocab_size in (("head", 96), ("other", 64)):
        config = DFlashHead.config_class(vocab_size=vocab_size, aux_hidden_state_layer_ids=[1], head_dim=8, **sizes)
        DFlashHead(config).save_pretrained(tmp_path / name)
    (tmp_path / "fields.json").write_text(json.dumps(next((a for a in arguments if isinstance(a, dict)), {})))
    names = {"MODEL": saved, "EAGLE": tmp_path / "eagle", "HEAD": tmp_path / "head", "OTHER": tmp_path / "other"}
    given = [tmp_path / "fields.json" if isinstance(a, dict) else names.get(a, a) for a in arguments]
    command = ["train", "dflash", *given, "--model", saved, "--data", talks, "--output", tmp_path / "out"]
    assert run(monkeypatch, *command) == 2
    streams = capsys.readouterr()
    assert message in streams.err
    assert error_line(streams.err).startswith("hf-specdec: ")
    assert not (tmp_path / "out").exists()


def test_the_mask_token_occurs_in_no_conversation() -> None:
    tokenizer, every = zoo.chat_tokenizer(), list(range(96))
    assert choose_mask_token(tokenizer, [Conversation.of([5], [6, 7])], 100) == 99  # a row that no text uses
    assert choose_mask_token(tokenizer, [Conversation.of([5], [6, 99, 98])], 100) == 97
    assert choose_mask_token(tokenizer, [Conversation.of([95], [94, 93])], 96) == 91  # not the end of an answer
    tokenizer.add_special_tokens({"additional_special_tokens": ["w40", "w41"]})
    assert choose_mask_token(tokenizer, [Conversation.of([5], [6])], 96) == 41
    assert choose_mask_token(tokenizer, [Conversation.of([41], [6])], 96) == 40
    left = Conversation.of([], [token for token in every if token != 7])
    assert choose_mask_token(tokenizer, [left], 96) == 7
    with pytest.raises(InvalidConfigError, match=r"All tokens occur in the data.*--mask-token-id"):
        choose_mask_token(tokenizer, [Conversation.of([], every)], 96)


def test_help(monkeypatch: Patch, capsys: Captured) -> None:
    assert run(monkeypatch, "train", "dflash", "--help") == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--markov-rank", "--mask-token-id", "--causal", "--anchors"))
