"""Keras on two ranks: Keras 3 on each backend, and Keras 2; one group of ranks runs all checks of a backend."""

import functools
import json
import sys
import tempfile
from pathlib import Path

import hvd_keras_work as work
import pytest
from conftest import command
from ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]


@functools.cache
def outcomes(backend: str) -> list[dict[str, str]]:
    """By check, what went wrong on each rank."""
    pytest.importorskip("keras", reason="Keras is not installed: pip install 'tutti-train[keras]'")
    pytest.importorskip(backend)
    if backend in ("tensorflow", "tf_keras"):
        return run_ranks(2, work.outcomes, backend)
    with tempfile.TemporaryDirectory() as folder:  # the server that forks ranks has Keras with TensorFlow already
        words = [sys.executable, "-m", "tutti", "run", "-n", "2", work.__file__, backend, folder]
        done = command(*words, cwd=Path(folder), PYTHONPATH=str(Path(work.__file__).parent))
        assert done.code == 0, done.all
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, name, marks=pytest.mark.xdist_group(f"keras on {backend}"))  # one group of ranks for all
        for backend, name in sorted((backend, name) for name, backends in work.CHECKS.items() for backend in backends)
    ],
)
def test_keras(backend: str, name: str) -> None:
    found = outcomes(backend)
    assert all(name in each for each in found), f"not run, after {list(found[0])[-1:]}"
    assert [each[name] for each in found] == ["", ""]
