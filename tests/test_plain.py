"""Models whose plain `generate()` is not transformers' loop over text: refused at `attach`, or at the first call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.verification.trials import ordinary_tokens

Llama: Any = type(zoo.build("llama"))


class _OwnLoop(Llama):
    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return super()._sample(*args, **kwargs)


class _OwnCache(Llama):
    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super()._prepare_cache_for_generation(*args, **kwargs)


class _NeedsVoice(Llama):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("no voice was given.")


class _Strips(Llama):
    def generate(self, inputs: torch.Tensor, **kwargs: Any) -> Any:
        return super().generate(inputs, **kwargs)[:, inputs.shape[1] :]


class _Codes(Llama):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)[..., None]


class _AnotherModel(Llama):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return zoo.build("llama").generate(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_OwnLoop, r"a decoding loop that is not transformers' \(_OwnLoop._sample\)"),
        (_OwnCache, r"a cache that is not transformers' \(_OwnCache._prepare_cache_for_generation\)"),
        (_NeedsVoice, "its plain generate\\(\\) fails on a text prompt with ValueError: no voice was given. Specul"),
        (_Strips, "returns a tensor \\[2, 3\\] for a prompt \\[2, 6\\]"),
        (_Codes, "returns a tensor \\[2, 9, 1\\]"),
        (_AnotherModel, "runs another model's forward"),
    ],
)
def test_a_generate_that_is_not_transformers_is_refused(kind: Any, reason: str) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    model.__class__ = kind
    with pytest.raises(UnsupportedModelError, match=reason):
        SpeculativeGenerationMixin.attach(model)
    assert not model._forward_pre_hooks
    assert not isinstance(model, SpeculativeGenerationMixin)


def test_stored_options_do_not_hinder_attaching() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    model.generation_config.update(
        stop_strings=["end"], num_beams=4, do_sample=True, temperature=0.5, max_length=3, min_new_tokens=9,
        cache_implementation="static", return_dict_in_generate=True, num_return_sequences=3,
    )  # fmt: skip
    SpeculativeGenerationMixin.attach(model)


@pytest.mark.parametrize("base", [_OwnLoop, _OwnCache])
def test_the_mixin_as_a_base_class_refuses_at_the_first_call(base: Any) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    model.__class__ = type("Speculative", (SpeculativeGenerationMixin, base), {})
    ids = torch.arange(3, 12)[None]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 12)
    with pytest.raises(UnsupportedModelError, match="that is not transformers'"):
        model.generate(ids, max_new_tokens=3, speculative="prompt_lookup")


class _SkipsChecks:
    def _validate_generation_mode(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is validated, as in a `generate()` that calls the hooks itself."""


def test_a_generate_without_transformers_checks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    model.__class__ = type("Unchecked", (_SkipsChecks, SpeculativeGenerationMixin, Llama), {})
    ids = torch.arange(3, 12)[None]
    with pytest.raises(UnsupportedModelError, match="skips the steps of transformers"):
        model.generate(ids, max_new_tokens=3, speculative="prompt_lookup")


def test_special_tokens_are_no_text() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    first = ordinary_tokens(model, 13).tolist()
    model.config.image_token_id, model.config.audio_token_ids = first[0], [*first[1:4], None, {"a": 5}]
    model.config.video_token_index = {"start": 7}
    tokens = ordinary_tokens(model, 13).tolist()
    assert len(tokens) == 13
    assert not {*first[:4], 0, 1} & {*tokens}
