"""The annotations of the settings take every value that the reference documents: mypy checks this file as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_type

from hf_specdec import AdaptiveConfig, Drafter, SpeculationStats, SpeculativeConfig, SpeculativeGenerationMixin

TIERS: dict[str, Any] = {"candidate_steps": [1, 2]}


def test_paths_of_a_tree() -> None:
    lists: list[list[int]] = [[0], [0, 0]]
    mixed: list[tuple[int] | tuple[int, int]] = [(0,), (0, 0)]
    for config in (
        SpeculativeConfig(tree=[(0,), (0, 0)]), SpeculativeConfig(tree=((0,), (0, 0))), SpeculativeConfig(tree=lists),
        SpeculativeConfig(tree=mixed), replace(SpeculativeConfig("eagle"), method="auto", tree=lists),
    ):  # fmt: skip
        assert config.tree == ((0,), (0, 0))
    assert [SpeculativeConfig(tree=tree).tree for tree in (None, "dynamic", "static")] == [None, "dynamic", "static"]


def test_names_in_lists_and_tuples() -> None:
    for config in (
        SpeculativeConfig(methods=["eagle", "prompt_lookup"], history=["ann", "bob"]),
        SpeculativeConfig(methods=("eagle", "prompt_lookup"), history=("ann", "bob")),
    ):
        assert config.methods == ("eagle", "prompt_lookup")
        assert config.history == ("ann", "bob")
    single = (
        SpeculativeConfig(history=True),
        SpeculativeConfig(history="ann"),
        SpeculativeConfig(history="per_prompt"),
    )
    assert [config.history for config in single] == [True, "ann", "per_prompt"]
    assert SpeculativeConfig(history=False).history is SpeculativeConfig(history=None).history is None


def test_tiers(tmp_path: Path) -> None:
    path = tmp_path / "tiers.json"
    path.write_text(json.dumps(TIERS))
    fields: Mapping[str, Any] = TIERS
    for config in (
        SpeculativeConfig(adaptive=AdaptiveConfig([1, 2])), SpeculativeConfig(adaptive=AdaptiveConfig((1, 2))),
        SpeculativeConfig(adaptive=TIERS), SpeculativeConfig(adaptive=fields), SpeculativeConfig(adaptive=path),
        SpeculativeConfig(adaptive=str(path)), SpeculativeConfig(adaptive=AdaptiveConfig.from_file(path)),
        SpeculativeConfig.from_dict({"adaptive": TIERS}), SpeculativeConfig.of({"adaptive": TIERS}),
    ):  # fmt: skip
        assert config.adaptive == AdaptiveConfig((1, 2))
    assert [SpeculativeConfig(adaptive=value).adaptive for value in (None, True, False)] == [None, True, False]


def test_other_names_of_values() -> None:
    assert SpeculativeConfig(compile=True) == SpeculativeConfig(compile="compile")
    assert SpeculativeConfig(compile=False) == SpeculativeConfig(compile="none")
    assert SpeculativeConfig("eagle", eagle_topk=4) == SpeculativeConfig("eagle", top_k=4)
    assert SpeculativeConfig(acceptance="typical", posterior_threshold=1).posterior_threshold == 1


def test_an_attached_model_has_the_methods_of_the_mixin(llama: Any) -> None:
    attached = SpeculativeGenerationMixin.attach(llama)
    assert_type(attached.drafters, dict[str, Drafter])
    assert_type(attached.last_speculation, SpeculationStats | None)
    assert attached is llama
