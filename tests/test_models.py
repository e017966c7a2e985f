"""Every model of transformers with a `generate()` is equal or refused, as docs/models.md says."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import transformers
from _pytest.mark.structures import ParameterSet
from packaging.version import Version

import drafters
import generative
import models
import zoo

TABLE_VERSION = Version("5.23.0")
TOLD = models.told()
SLOW = {"dots3_note_text"}


def _parameters(names: Iterable[str]) -> list[ParameterSet]:
    """Ordinary architectures with trees are much alike: `make test` runs those of `zoo.CORE`, CI runs all."""
    ordinary = {name for name in names if name not in zoo.CORE and TOLD.get(name) == "equal, trees"} | SLOW
    return [pytest.param(name, marks=pytest.mark.slow if name in ordinary else []) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", _parameters(zoo.NAMES))
def test_equal_or_refused(name: str) -> None:
    if Version(transformers.__version__) != TABLE_VERSION and name not in zoo.CORE:
        try:
            zoo.build(name)
        except Exception as error:
            pytest.skip(f"its tiny configuration is made for transformers {TABLE_VERSION}: {error}")
    verdict = models.verdict(name, drafters.WALKED)
    if Version(transformers.__version__) == TABLE_VERSION:
        assert TOLD[name] == verdict.told, verdict
    elif name in zoo.CORE:
        assert verdict.outcome == "tree", verdict


@pytest.mark.skipif(Version(transformers.__version__) != TABLE_VERSION, reason="made for another transformers")
@pytest.mark.parametrize("name", _parameters([name for name in TOLD if name not in zoo.NAMES]))
def test_other_classes_are_equal_or_refused(name: str) -> None:
    verdict = models.class_verdict(name, [drafters.BY_NAME["sometimes"]], batch_sizes=[3])
    assert TOLD[name] == verdict.told, verdict


def test_the_table_has_every_model() -> None:
    if Version(transformers.__version__) == TABLE_VERSION:
        assert set(zoo.NAMES) | set(zoo.ELSEWHERE) >= set(zoo.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        assert set(TOLD) == {*zoo.NAMES, *generative.classes()} - set(generative.NOT_BUILT)
