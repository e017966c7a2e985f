"""Configurations: what they take, what they refuse, JSON both ways."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from hf_specdec import AdaptiveConfig, InvalidConfigError, SpeculativeConfig


def test_json_round_trip() -> None:
    config = SpeculativeConfig(
        "eagle", num_steps=3, top_k=2, tree=[(0, 0), (0,)], adaptive=AdaptiveConfig(candidate_steps=[1, 2])
    )
    assert config.tree == ((0,), (0, 0))
    assert SpeculativeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert AdaptiveConfig.from_dict(json.loads(json.dumps(AdaptiveConfig().to_dict()))) == AdaptiveConfig()


def test_defaults_are_the_contract() -> None:
    assert SpeculativeConfig().to_dict() == {
        "method": "auto", "num_steps": None, "top_k": None, "num_draft_tokens": None, "tree": None,
        "acceptance": "auto", "posterior_threshold": 0.09, "posterior_alpha": 0.3, "adaptive": None,
        "compile": "auto", "max_cache_length": None,
    }  # fmt: skip
    assert AdaptiveConfig().to_dict() == {
        "candidate_steps": [1, 3, 7], "ema_alpha": 0.2, "update_interval": 5, "warmup_batches": 10,
        "down_hysteresis": -0.25, "up_hysteresis": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": ""}, "method name"),
        ({"method": 3}, "method name"),
        ({"num_steps": 0}, "an integer from 1 to"),
        ({"top_k": 1.5}, "an integer from 1 to"),
        ({"num_draft_tokens": True}, "an integer from 1 to"),
        ({"max_cache_length": -1}, "an integer from 1 to"),
        ({"tree": "deep"}, "'dynamic', 'static', a list"),
        ({"tree": []}, "at least one path"),
        ({"acceptance": "lenient"}, "one of 'auto', 'greedy'"),
        ({"compile": "fast"}, "one of 'auto', 'none', 'kernels'"),
        ({"compile": 1}, "one of 'auto', 'none', 'kernels'"),
        ({"eagle_topk": 0}, "`eagle_topk` must be an integer from 1 to 4096"),
        ({"eagle_topk": True}, "`eagle_topk` must be an integer from 1 to 4096"),
        ({"eagle_topk": 4, "top_k": 8}, "another name of `top_k`"),
        ({"posterior_threshold": 0}, "number in"),
        ({"posterior_alpha": "0.3"}, "number in"),
        ({"adaptive": 3}, "AdaptiveConfig"),
        ({"adaptive": {"candidate_step": [1]}}, "Did you mean 'candidate_steps'"),
        ({"adaptive": {"candidate_steps": [3, 1]}}, "ascending"),
        ({"adaptive": {"candidate_steps": 3}}, "ascending depths"),
        ({"adaptive": {"ema_alpha": 0}}, "ema_alpha"),
        ({"adaptive": {"update_interval": 0}}, "update_interval"),
        ({"adaptive": {"up_hysteresis": "x"}}, "up_hysteresis"),
        ({"nm_steps": 2}, "Did you mean 'num_steps'"),
    ],
)
def test_what_means_nothing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message) as caught:
        SpeculativeConfig.from_dict(fields)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(InvalidConfigError, match=message):
        SpeculativeConfig(**fields)


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(InvalidConfigError, match=r"has no field 'foo'\. Fields: method, "):  # nothing is similar
        SpeculativeConfig(foo=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidConfigError, match=r"AdaptiveConfig has no field 'ema'\. Did you mean 'ema_alpha'"):
        AdaptiveConfig(ema=0.5)  # type: ignore[call-arg]
    with pytest.raises(InvalidConfigError, match=r"SpeculativeConfig has no field 'num_step'\."):
        replace(SpeculativeConfig("eagle", eagle_topk=4), num_step=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("value", "stored"),
    [(True, "inductor"), ("compile", "inductor"), ("inductor", "inductor"), (False, "none"), ("none", "none"),
     ("cuda_graph", "cuda_graph"), ("auto", "auto")],
)  # fmt: skip
def test_compile_has_one_name_per_mode(value: Any, stored: str) -> None:
    config = SpeculativeConfig.from_dict({"compile": value})
    assert config.compile == config.to_dict()["compile"] == stored
    assert config == SpeculativeConfig(compile=value)


def test_eagle_topk_is_another_name_of_top_k() -> None:
    config = SpeculativeConfig("eagle", eagle_topk=4)
    assert config == SpeculativeConfig("eagle", top_k=4) == SpeculativeConfig("eagle", None, 4, eagle_topk=4)
    assert config == SpeculativeConfig.from_dict({"method": "eagle", "eagle_topk": 4})
    assert (config.top_k, config.eagle_topk, SpeculativeConfig().eagle_topk) == (4, 4, None)
    assert "eagle_topk" not in config.to_dict()
    assert replace(config, top_k=8).eagle_topk == 8
    assert pickle.loads(pickle.dumps(config)) == config


def test_configs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SpeculativeConfig().method = "eagle"  # type: ignore[misc]
