"""EAGLE-3 heads whose files allow several readings: the rule, the caller's choice, and the trial."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig
from typer.testing import CliRunner

import ambiguous_heads
import layouts
import zoo
from hf_specdec import (
    CheckpointFormatError,
    DrafterMismatchError,
    Eagle3Config,
    Eagle3Head,
    InvalidConfigError,
    SpeculativeGenerationMixin,
    export_head,
    load_head,
)
from hf_specdec.checkpoints.hub import inspect_head
from hf_specdec.cli import app
from hf_specdec.drafters.registry import drafter_of
from hf_specdec.generation import reading_trial
from hf_specdec.heads.readings import Ambiguity, Reading
from hf_specdec.verification.features import LAST, FeatureTap

EXAMPLES = layouts.all_examples()


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))


def target(depth: int, kind: str = "llama") -> Any:
    config = LlamaConfig(num_hidden_layers=depth)
    config.model_type = kind
    return config


@pytest.mark.parametrize(
    ("ids", "offsets", "depth", "kind", "layers"),
    [
        ((1, 15, 28), (1, 0), 32, "llama", [2, 16, 29]),  # SpecForge, SGLang
        ((24, 30, 36), (1, 0), 36, "gpt_oss", [24, 30, 36]),  # NVIDIA's head for gpt-oss
        ((24, 30, 36), (1, 0), 36, "llama", [24, 30, 36]),  # the largest is the number of layers
        ((1, 17, 32), (1, 0), 36, "gpt_oss_text", [1, 17, 32]),
        ((2, 16, 29), (0,), 32, "llama", [2, 16, 29]),  # at the top level
        ((-1, 15, 28), (1, 0), 32, "llama", [0, 16, 29]),
    ],
)
def test_the_rule_for_layer_ids(
    ids: tuple[int, ...], offsets: tuple[int, ...], depth: int, kind: str, layers: list[int]
) -> None:
    ambiguity = Ambiguity(ids, offsets)
    first = ambiguity.readings(target(depth, kind))[0]
    assert ambiguity.layers(first, depth) == layers
    assert not first.final_norm


def test_every_possible_reading_and_no_other() -> None:
    found = Ambiguity((1, 3, 5), (1, 0), (True, False)).readings(target(6))
    assert found == tuple(
        Reading(normed, offset, final)
        for normed in (True, False)
        for offset, final in ((1, False), (1, True), (0, False))
    )
    assert Ambiguity((1, 3, 6), (1, 0)).layers(Reading(False, 0, True), 6) == [1, 3, LAST]
    with pytest.raises(DrafterMismatchError, match=r"reads the layers \[1, 3, 8\], the target has only 6"):
        Ambiguity((1, 3, 8), (1, 0)).readings(target(6))


@pytest.mark.parametrize(
    "reading",
    [
        {"final_norm": True},
        {"offset": 1},
        {"layer_offset": True},
        {"layer_offset": 2},
        {"norm_output": 1},
        [("norm_output", True)],
    ],
)
def test_invalid_readings(reading: Any, llama: Any, tmp_path: Path) -> None:
    folder = write(llama, tmp_path)
    with pytest.raises(InvalidConfigError, match="`reading`"):
        llama.load_drafter(folder, reading=reading)
    assert not llama.drafters


def write(model: Any, folder: Path, ids: list[int] | None = None, **fields: Any) -> Path:
    """A random head for the zoo's models in SpecForge's layout."""
    torch.manual_seed(1)
    head = Eagle3Head(Eagle3Config.for_target(model.config, eagle_aux_hidden_state_layer_ids=[1, 2, 3]))
    config = {
        **layouts.llama_fields(architectures=["LlamaForCausalLMEagle3"], **fields),
        "vocab_size": zoo.VOCAB_SIZE, "intermediate_size": head.config.intermediate_size,
        "num_attention_heads": head.config.num_attention_heads,
        "num_key_value_heads": head.config.num_key_value_heads,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids or [0, 1, 2]},
    }  # fmt: skip
    return layouts.Example("specforge", config, head.state_dict(), layouts.draft_eagle3).write(folder)


def test_the_caller_sets_the_reading(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(llama, tmp_path, norm_output=True)
    assert load_head(folder).reading is None
    chosen = {"norm_output": False, "layer_offset": 0}
    head = llama.load_drafter(folder, reading=chosen).head
    assert head.reading == Reading(False, 0)
    assert head.config.norm_output is False
    assert head.feature_layers == (0, 1, 2)
    seen: list[tuple[Reading, ...]] = []
    monkeypatch.setattr(
        "hf_specdec.generation.head_loading.choose_reading", lambda m, h, found: seen.append(found) or found[-1]
    )
    head = llama.load_drafter(folder, reading={"layer_offset": 0}).head
    assert seen == [(Reading(True, 0), Reading(False, 0))]
    assert head.reading == Reading(False, 0)
    with pytest.raises(InvalidConfigError, match="has only one reading"):
        llama.load_drafter(Eagle3Head(Eagle3Config.for_target(llama.config)), reading=chosen)


def test_inspect_names_what_is_open(llama: Any, tmp_path: Path) -> None:
    report = inspect_head(write(llama, tmp_path, norm_output=True))
    assert report.ambiguous == ["norm_output", "layer_offset"]
    assert not report.needs_adapter
    assert "readings" in CliRunner().invoke(app, ["inspect", str(tmp_path)]).output


def test_a_failed_trial_decides_nothing(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = load_head(write(llama, tmp_path, norm_output=True))

    def fail(model: Any, head: Any, readings: Any) -> Reading:
        head.read_as(readings[-1], model.config)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_specdec.generation.head_loading.choose_reading", fail)
        with pytest.raises(KeyboardInterrupt):
            llama.load_drafter(head)
    assert head.reading is None
    assert head.config.norm_output is True
    assert not llama.drafters


def test_other_facts_of_a_head_are_another_trial(llama: Any, tmp_path: Path) -> None:
    readings = (Reading(True, 1), Reading(False, 1))
    kept = set()
    for number, fields in enumerate(({}, {"rope_theta": 5e5}, {"norm_before_residual": True})):
        kept.add(reading_trial._kept_file(llama, load_head(write(llama, tmp_path / str(number), **fields)), readings))
    kept.add(reading_trial._kept_file(llama, load_head(write(llama, tmp_path / "ids", [0, 1, 3])), readings))
    assert len(kept) == 4


def test_the_users_generation_settings_do_not_disturb_the_texts(sure_llama: Any) -> None:
    plain = reading_trial._write_texts(sure_llama)
    stored = sure_llama.generation_config
    stored.num_return_sequences, stored.do_sample, stored.temperature = 2, True, 0.1
    texts = reading_trial._write_texts(sure_llama)
    assert sure_llama.generation_config is stored
    assert all(torch.equal(one.token_ids, two.token_ids) for one, two in zip(plain, texts, strict=True))


def test_without_trial_the_documented_reading(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec.generation.head_loading.choose_reading", None)  # calling it would fail
    head = llama.load_drafter(write(llama, tmp_path, norm_output=True), verify=False).head
    assert head.reading == Reading(True, 1)
    assert head.feature_layers == (1, 2, 3)


def test_the_last_layer_is_read_before_the_final_norm() -> None:
    model = zoo.build("llama")
    depth = model.config.num_hidden_layers
    ids = torch.arange(3, 12)[None]
    with torch.no_grad(), FeatureTap(model, (1, depth, LAST)) as tap:
        states = model(ids, output_hidden_states=True).hidden_states
    features = tap.take()
    assert torch.equal(features.of((LAST,)), states[-1])  # transformers' last entry is normalized
    assert torch.equal(model.model.norm(features.of((depth,))), states[-1])
    assert not torch.equal(features.of((depth,)), states[-1])
    assert torch.equal(features.of((1,)), states[1])


@pytest.mark.parametrize(("reading", "first"), [({"final_norm": False}, False), ({"final_norm": True}, True)])
def test_heads_that_read_the_last_layer_generate_the_same(
    reading: dict[str, bool], first: bool, llama: Any, tmp_path: Path
) -> None:
    depth = llama.config.num_hidden_layers
    head = llama.load_drafter(write(llama, tmp_path, [1, 2, depth]), reading=reading).head
    assert head.feature_layers == (1, 2, LAST if first else depth)
    ids = torch.arange(3, 12)[None]
    plain = llama.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(llama.generate(ids, max_new_tokens=12, do_sample=False, speculative="eagle"), plain)


def test_an_lm_head_tied_to_the_targets_embedding(sure_llama: Any, tmp_path: Path) -> None:
    folder = write(sure_llama, tmp_path, tie_word_embeddings=True)
    tensors = {n: t for n, t in load_head(folder).state_dict().items() if n != "lm_head.weight"}
    config = json.loads((folder / "config.json").read_text())
    layouts.Example("specforge", config, tensors, layouts.draft_eagle3).write(folder)
    assert load_head(folder).shares_lm_head
    head = sure_llama.load_drafter(folder, verify=False).head
    assert not head.shares_lm_head
    assert torch.equal(head.lm_head.weight, sure_llama.get_input_embeddings().weight)
    assert not torch.equal(head.lm_head.weight, sure_llama.get_output_embeddings().weight)
    ids = torch.arange(3, 12)[None]
    plain = sure_llama.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(sure_llama.generate(ids, max_new_tokens=12, do_sample=False, speculative="eagle"), plain)
    with torch.no_grad():  # another target has another embedding, and the head's is a copy
        sure_llama.get_input_embeddings().weight.mul_(2)
    assert not torch.equal(head.lm_head.weight, sure_llama.get_input_embeddings().weight)
    sure_llama.load_drafter(head)
    assert torch.equal(head.lm_head.weight, sure_llama.get_input_embeddings().weight)
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    assert sure_llama.load_drafter(folder, verify=False).head.shares_lm_head


# ----------------------------------------------------------------------------------------------- the trial


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["ids of layers, SpecForge's norm", pytest.param("the last layer, after its norm", marks=pytest.mark.slow)],
)
def test_the_right_reading_is_found(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, layers = ambiguous_heads.READINGS[name]
    model = ambiguous_heads.tiny_target(0)
    head = ambiguous_heads.trained_head(model, reading, layers, 0, updates=200)
    folder = ambiguous_heads.stored(head, reading, layers, tmp_path / "head")
    SpeculativeGenerationMixin.attach(model)
    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO, logger="hf_specdec"):
        found = model.load_drafter(folder).head
    assert found.reading == reading
    assert torch.equal(torch.get_rng_state(), state)
    assert str(reading) in caplog.text
    assert "allows 4 readings" in caplog.text
    kept = list((tmp_path / "hf" / "hf-specdec" / "readings").glob("*.json"))
    assert len(kept) == 1
    # the second time it is read from disk, whatever the texts would say
    with monkeypatch.context() as patch:
        patch.setattr(reading_trial, "_write_texts", None)
        assert model.load_drafter(folder).head.reading == reading
    kept[0].write_text("{")
    assert model.load_drafter(folder).head.reading == reading
    kept[0].write_text(json.dumps({"reading": "norm_output=maybe"}))
    assert model.load_drafter(folder).head.reading == reading
    # another target is another choice
    other = SpeculativeGenerationMixin.attach(ambiguous_heads.tiny_target(1))
    other.load_drafter(folder)
    assert len(list(kept[0].parent.glob("*.json"))) == 2


def test_chat_models_answer_questions_and_others_sample(sure_llama: Any, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    sampled = reading_trial._write_texts(sure_llama)
    assert {(text.token_ids.shape[1], text.prompt_length) for text in sampled} == {(49, 1)}
    assert len({tuple(text.token_ids[0].tolist()) for text in sampled}) == len(reading_trial.PROMPTS)
    tokenizer = zoo.chat_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    sure_llama.config.name_or_path = str(tmp_path)
    answers = reading_trial._write_texts(sure_llama)
    assert torch.equal(torch.get_rng_state(), state)
    for text, prompt in zip(answers, reading_trial.PROMPTS, strict=True):
        asked = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
        ids = torch.tensor([asked["input_ids"]])
        assert text.prompt_length == ids.shape[1]
        assert torch.equal(text.token_ids, sure_llama.generate(ids, do_sample=False, max_new_tokens=48))


@pytest.mark.parametrize(
    ("gains", "replaced"),
    [
        ((0, 0, 0, 0, 0, 0), False),
        ((0.4, -0.2, 0.3, -0.1, 0.3, -0.2), False),  # 8 % more on average, but from noise
        ((0.02, 0.03, 0.02, 0.03, 0.02, 0.03), False),  # certain and too small
        ((0.1, 0.3, 0.1, 0.2, 0.1, 0.2), True),
    ],
)
def test_a_gain_must_exceed_the_spread_over_texts(
    gains: tuple[float, ...], replaced: bool, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, left = (Reading(True, 1), Reading(False, 1)), iter(gains)
    monkeypatch.setattr(reading_trial, "_accepted_tokens", lambda m, head, *args: (
        1.0 if head.config.norm_output else 1.0 + next(left)
    ))  # fmt: skip
    head = llama.load_drafter(write(llama, tmp_path, norm_output=True), reading={"layer_offset": 1}).head
    assert head.reading == readings[replaced]


@pytest.mark.slow
def test_heads_that_draft_nothing_keep_the_documented_reading(tmp_path: Path) -> None:
    model = SpeculativeGenerationMixin.attach(ambiguous_heads.tiny_target(0))
    for seed in (0, 3, 6):  # another reading of these accepts 6 %, 9 % and 22 % more of almost nothing, in every text
        torch.manual_seed(seed)
        head = Eagle3Head(Eagle3Config.for_target(model.config, eagle_aux_hidden_state_layer_ids=[1, 2, 5]))
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(5)
        folder = ambiguous_heads.stored(head, Reading(True, 1), [1, 2, 5], tmp_path / str(seed))
        assert model.load_drafter(folder).head.reading == Reading(True, 1)


# ----------------------------------------------------------------------------------------------- adapters


def test_a_head_trained_with_an_adapter_needs_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = SpeculativeGenerationMixin.attach(zoo.shallow("llama", 4))
    folder = write(model, tmp_path / "head")
    adapted = peft.get_peft_model(
        zoo.shallow("llama", 4), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(folder, save_embedding_layers=False)  # PEFT 0.19 would look for the model's files
    with pytest.raises(DrafterMismatchError, match=r"it is not loaded or not active in this .*load_adapter"):
        model.load_drafter(folder)
    assert not model.drafters
    model.load_adapter(str(folder))
    model.load_drafter(folder, verify=False)
    ids = torch.arange(3, 12)[None]
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, speculative="eagle"), plain)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n).add_(1)
    with pytest.raises(DrafterMismatchError, match="1 of its tensors differ"):
        model.load_drafter(folder)
    try:
        model.disable_adapters()
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(str(error))
    with pytest.raises(DrafterMismatchError, match="not active"):
        model.add_drafter(drafter_of(load_head(folder)))
    with pytest.raises(CheckpointFormatError, match="together with an adapter"):
        export_head(load_head(folder), tmp_path / "out", format="speculators")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(Exception, match=r"no adapter_model\.safetensors"):
        model.load_drafter(folder)
