"""The symmetries of the cube: a group of 48, under which velocities transform like gradients."""

import numpy as np
import pytest

from tutti.data.nbody.sources import AXES, FLIPS, IDENTITY, channel_sources, transformed

ALL = range(48)
CELLS = np.arange(27).reshape(3, 3, 3)


def gradient(field: np.ndarray) -> np.ndarray:
    """Central differences of a periodic field along the three axes."""
    return np.stack([(np.roll(field, -1, axis) - np.roll(field, 1, axis)) / 2 for axis in range(3)])


def turned(vector: np.ndarray, symmetry: int, vectors: bool) -> np.ndarray:
    sources = channel_sources(0, symmetry, vectors)
    return np.stack([sign * transformed(vector[channel], symmetry) for channel, sign in sources])


def test_there_are_48_of_them_and_the_first_does_nothing() -> None:
    assert len(AXES) == len(FLIPS) == 48
    assert len({transformed(CELLS, symmetry).tobytes() for symmetry in ALL}) == 48
    assert np.array_equal(transformed(CELLS, IDENTITY), CELLS)
    assert IDENTITY == 0
    assert channel_sources(1, IDENTITY, vectors=True) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_one_after_the_other_is_one_of_them() -> None:
    known = {transformed(CELLS, symmetry).tobytes() for symmetry in ALL}
    for first in ALL:
        pairs = {transformed(transformed(CELLS, first), second).tobytes() for second in ALL}
        assert pairs == known


def test_vectors_turn_as_their_field_does_also_one_after_the_other() -> None:
    """The components of a pair of symmetries are those of the one symmetry that the pair is."""
    by_cells = {transformed(CELLS, symmetry).tobytes(): symmetry for symmetry in ALL}
    vector = np.random.default_rng(0).normal(size=(3, 4, 4, 4))
    for first in range(0, 48, 5):
        for second in ALL:
            both = by_cells[transformed(transformed(CELLS, first), second).tobytes()]
            one_by_one = turned(turned(vector, first, True), second, True)
            assert np.array_equal(one_by_one, turned(vector, both, True))


def test_a_symmetry_is_a_view_and_leaves_leading_axes() -> None:
    fields = np.random.default_rng(0).normal(size=(2, 4, 3, 3, 3))
    for symmetry in ALL:
        found = transformed(fields, symmetry)
        assert found.base is not None and np.shares_memory(found, fields)
        assert np.array_equal(found[1, 2], transformed(fields[1, 2], symmetry))


@pytest.mark.parametrize("symmetry", ALL)
def test_the_gradient_of_a_turned_field_is_the_turned_gradient(symmetry: int) -> None:
    field = np.random.default_rng(0).normal(size=(6, 6, 6))
    expected = gradient(transformed(field, symmetry))
    assert np.array_equal(turned(gradient(field), symmetry, vectors=True), expected)
    is_kept = np.array_equal(turned(gradient(field), symmetry, vectors=False), expected)
    assert is_kept == (symmetry == IDENTITY), "components that stay are right only where nothing is turned"


@pytest.mark.parametrize("scalars", [1, 2])
def test_scalars_come_first_and_keep_their_sign(scalars: int) -> None:
    for symmetry in ALL:
        for vectors in (True, False):
            sources = channel_sources(scalars, symmetry, vectors)
            assert sources[:scalars] == [(channel, 1) for channel in range(scalars)]
            assert sorted(channel for channel, _ in sources) == list(range(scalars + 3))
        assert channel_sources(scalars, symmetry, False) == [(channel, 1) for channel in range(scalars + 3)]
