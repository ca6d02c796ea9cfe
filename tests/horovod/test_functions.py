"""Weights, optimizer state and objects between ranks."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hvd_optimizer_work import (
    OPTIMIZERS,
    broadcast_fresh_state,
    broadcast_weights,
    exchange_objects,
    restore_on_the_first_rank,
)
from rank_jobs import run_ranks

from tutti.horovod.torch.functions import _from_bytes, _to_bytes
from tutti.ranks.secret import ForgedContent, make_secret

pytestmark = pytest.mark.ranks


def test_weights_come_from_the_root_in_place_whatever_their_order_layout_and_type() -> None:
    for state, pairs, tensors, generator, text in run_ranks(2, broadcast_weights):
        assert state == [2.0]
        assert pairs == [[0], True, [0.0, 0.0]]
        assert tensors == [[1.0], [6]]
        assert generator[0] == "ValueError" and generator[1].startswith("invalid params of type: <class 'generator'>")
        assert text == (
            "ValueError",
            "params has <class 'str'> under 'note': expected tensors. Use hvd.broadcast_object.",
        )


def test_objects_of_any_size_reach_all_ranks() -> None:
    assert run_ranks(2, exchange_objects) == [[1, 100, 5, [[], [1, 1, 1]]]] * 2


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_and_options_of_the_first_rank_reach_a_rank_that_has_none(kind: str) -> None:
    first, second = run_ranks(2, restore_on_the_first_rank, kind, kind in ("SGD", "Adam", "Adagrad"))
    assert first["state"] and first == second
    options = first["groups"][0]
    assert options["lr"] == ("float", OPTIMIZERS[kind]["lr"])
    if kind == "SGD":
        assert options["nesterov"] == ("bool", True)
    if kind == "Adam":
        assert options["betas"] == ("tuple", (0.8, 0.99))


def test_state_that_is_not_there_is_made_without_moving_the_weights() -> None:
    for found in run_ranks(2, broadcast_fresh_state):
        assert found["weights stay"]
        assert found["gradients"] == [False, None, False, False]
        assert found["has state"] == [True, False, True, True]
        assert found["stateless"] == (0, 0.1)
        assert found["partial"] == [0, 0, 3, 3]
        assert found["LBFGS"][0] == "ValueError" and "cannot broadcast torch.optim.LBFGS state" in found["LBFGS"][1]
        assert found["lr tensor"] == ("torch.float32", pytest.approx(0.1))
        assert found["other groups"][0] == "ValueError" and "[[4], [1, 1, 1, 1]]" in found["other groups"][1]


def test_an_object_that_no_rank_of_the_job_has_signed_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Intruder:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "here"),)

    own, other = make_secret(), make_secret()
    monkeypatch.setenv("TUTTI_SECRET", other.value.hex())
    contents = [_to_bytes(Intruder()), torch.frombuffer(bytearray(pickle.dumps(Intruder())), dtype=torch.uint8)]
    monkeypatch.setenv("TUTTI_SECRET", own.value.hex())
    for content in [*contents, torch.empty(0, dtype=torch.uint8)]:
        with pytest.raises(ForgedContent, match="not signed by a process of this job"):
            _from_bytes(content)
    assert not (tmp_path / "here").exists()
    assert _from_bytes(_to_bytes({"a": [1]})) == {"a": [1]}
