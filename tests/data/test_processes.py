"""Work in order: the same results on any number of processes, and errors of the work as they are."""

import os
from contextlib import closing

import pytest

from tutti.data.processes import in_order
from tutti.errors import DataError


def scaled(factor: int, number: int) -> tuple[int, int]:
    if number == 77:
        raise DataError("77 is refused")
    return factor * number, os.getpid()


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 3])
def test_results_have_the_order_of_the_items(workers: int) -> None:
    found = list(in_order(scaled, 3, range(40), workers))
    assert [value for value, _ in found] == [3 * number for number in range(40)]
    assert (os.getpid() in {process for _, process in found}) == (workers == 1)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_raised_after_the_results_before_it(workers: int) -> None:
    found = []
    with pytest.raises(DataError, match="77 is refused"), closing(in_order(scaled, 1, range(70, 90), workers)) as made:
        found += (value for value, _ in made)
    assert found == list(range(70, 77))
