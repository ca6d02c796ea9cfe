"""Figures of a study in words."""

import pytest

from tutti.study.numbers import speed


@pytest.mark.parametrize(("given", "shown"), [(7718.4, "7,718"), (15.42, "15.4"), (15.0, "15.0"), (0.5, "0.500")])
def test_few_samples_a_second_have_parts(given: float, shown: str) -> None:
    assert speed(given) == shown
