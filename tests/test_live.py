"""What the GPU tests of the real server conclude from answers, on answers made by hand."""

import math
from typing import Any

import pytest
from live import CODES, FORMS, difference, first_number, gap, plant, rounding

NEAR = [(-1.0, 7), (-1.25, 8), (-3.0, 9)]


class Words:
    """A tokenizer whose tokens are words."""

    def __call__(self, text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


def test_gap_is_measured_from_the_best() -> None:
    assert gap(NEAR, 7) == 0
    assert gap(NEAR, 9) == 2
    assert math.isinf(gap(NEAR, 10))


def test_first_difference_is_found_with_its_gap() -> None:
    far = [(-0.1, 1), (-5.0, 2), (-6.0, 3)]
    assert difference([1, 7], [1, 7], [far, NEAR]) is None
    there = difference([1, 8, 2], [1, 7, 1], [far, NEAR, far])
    assert there is not None
    assert (there.at, there.dense, there.locks, there.gap) == (1, 7, 8, 0.25)
    there = difference([2, 7], [1, 7], [far, NEAR])
    assert there is not None
    assert there.gap == pytest.approx(4.9)
    assert difference([1], [1, 7], [far, NEAR]) is None


def test_rounding_follows_the_two_best_through_an_exchange() -> None:
    """The two best change places, and a position whose second best is not among the other's candidates says nothing."""
    swapped = [(-1.0, 8), (-1.5, 7)]
    assert rounding([[NEAR]], [[NEAR]]) == [0]
    assert rounding([[NEAR, NEAR]], [[swapped, [(-1.0, 7), (-2.0, 5)]]]) == [0.75]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_facts_are_planted_at_their_depths(form: Any) -> None:
    """Every fact once, at 5 % to 95 %, in text that holds no other word of it."""
    text = "\n\n".join(f"paragraph {i} with the number {i} and six words more" for i in range(2000))
    texts = plant(text, 5000, form, Words())
    assert [list(planted.depths) for planted in texts] == ([[city] for city in CODES] if form.alone else [list(CODES)])
    for planted in texts:
        assert abs(planted.tokens - 5000) < 20
        for number, (city, code) in enumerate(CODES.items()):
            fact = form.fact.format(city=city, code=code)
            told = city in planted.depths
            assert planted.text.count(f"\n\n{fact}\n\n") == told
            assert not told or planted.depths[city] == pytest.approx(0.05 + 0.1 * number, abs=0.01)
            assert f"number {int(code)} " not in planted.text


def test_answer_is_judged_by_its_first_number() -> None:
    assert first_number(" 7431.\n\nThe pass code of the Quito office is 8053.") == "7431"
    assert first_number("I do not know.") is None
