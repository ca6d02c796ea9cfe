"""Keras on two ranks: Keras 3 on each backend, and Keras 2; one group of ranks runs all checks of a backend."""

import functools

import hvd_keras_work as work
import pytest
from prepared import TENSORFLOW, TORCH
from rank_jobs import run_ranks

pytestmark = pytest.mark.ranks


def group_of(backend: str) -> str:
    return "tensorflow" if backend in ("tensorflow", "tf_keras") else f"keras on {backend}"


@functools.cache
def outcomes(backend: str) -> list[dict[str, str]]:
    """By check, what went wrong on each rank."""
    # Importing TensorFlow imports Keras too, with TensorFlow as its backend.
    return run_ranks(2, work.outcomes, backend, modules=TENSORFLOW if group_of(backend) == "tensorflow" else TORCH)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, name, marks=pytest.mark.xdist_group(group_of(backend)))  # one group of ranks for all
        for backend, name in sorted((backend, name) for name, backends in work.CHECKS.items() for backend in backends)
    ],
)
def test_keras(backend: str, name: str) -> None:
    found = outcomes(backend)
    assert all(name in each for each in found), f"not run, after {list(found[0])[-1:]}"
    assert [each[name] for each in found] == ["", ""]
