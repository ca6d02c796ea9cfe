"""Measured numbers in few digits, with a unit."""

import pytest

from tutti.bench.numbers import percent, show_seconds
from tutti.units import duration


@pytest.mark.parametrize(
    ("seconds", "text", "in_a_column"),
    [
        (2.0, "2 s", "2.00 s"),
        (0.0123, "12.3 ms", "12.3 ms"),
        (0.9996, "1,000 ms", "1,000 ms"),
        (0.09999, "100 ms", "100 ms"),
        (4.56e-5, "45.6 us", "45.6 us"),
        (-0.25, "-250 ms", "-250 ms"),
        (0.0, "0 us", "0 us"),
    ],
)
def test_a_time_has_the_unit_that_suits_it(seconds: float, text: str, in_a_column: str) -> None:
    assert show_seconds(seconds) == duration(seconds) == text
    assert show_seconds(seconds, keep_zeros=True) == in_a_column


def test_a_long_time_is_told_in_minutes_and_hours() -> None:
    assert [duration(each) for each in (90.0, 150.0, 5400.0)] == ["90 s", "2.5 min", "1.5 h"]


def test_a_share_has_the_digits_that_are_asked_for() -> None:
    assert (percent(0.1234), percent(0.1234, 1)) == ("12 %", "12.3 %")
