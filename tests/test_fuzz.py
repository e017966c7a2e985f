"""The differential fuzz with a small count; `make fuzz` runs it for long."""

from __future__ import annotations

import pytest

import fuzz
import fuzz_changes
import fuzz_lengths

BATCH = 40


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(n * BATCH, marks=pytest.mark.slow) for n in range(1, 8))])
def test_random_combinations_are_equal_or_refused(first: int) -> None:
    outcomes = []
    for number in range(first, first + BATCH):
        case = fuzz.case(number)
        try:
            outcomes.append(fuzz.check(case))
        except Exception as error:
            raise AssertionError(f"case {number}: {case}") from error
    assert outcomes.count("equal") > BATCH / 2


def test_the_check_sees_a_difference() -> None:
    """With another answer than plain's the check must fail, or it proves nothing."""
    plain, _, _ = fuzz.run(fuzz.case(1), None)
    other = plain.clone()
    other[0, -1] += 1
    fuzz.compare(plain, plain.clone())
    with pytest.raises(AssertionError, match="ids differ"):
        fuzz.compare(plain, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(15, 60, 15))])
def test_changes_between_calls_are_seen(first: int) -> None:
    outcomes = [outcome for number in range(first, first + 15) for outcome in fuzz_changes.check(number)]
    assert outcomes.count("equal") > len(outcomes) / 3
    assert "refused" in outcomes


TWICE = 2 * len(fuzz_lengths.NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(n * TWICE, marks=pytest.mark.slow) for n in range(1, 6))])
def test_lengths_around_every_limit_are_equal_or_refused(first: int) -> None:
    outcomes = []
    for number in range(first, first + TWICE):
        case = fuzz_lengths.case(number)
        try:
            outcomes.append(fuzz_lengths.check(case))
        except Exception as error:
            raise AssertionError(f"case {number}: {case}") from error
    assert outcomes.count("equal") > TWICE / 2
