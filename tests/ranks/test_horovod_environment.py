"""Who am I by the variables of horovodrun, alone and beside those of torchrun."""

import pytest

from tutti.errors import LaunchError
from tutti.ranks.environments import discover
from tutti.ranks.placement import Placement

ENV = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4321",
}
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h1"}


def test_horovodruns_variables_are_enough() -> None:
    assert discover(ENV) == Placement("horovodrun", 3, 4, 1, 2, 1, "h1", 4321)
    moved = discover(ENV | {"MASTER_ADDR": "h2", "MASTER_PORT": "1234"})
    assert (moved.address, moved.port) == ("h2", 1234)


def test_both_kinds_of_variables_must_agree() -> None:
    assert discover(ENV | TORCH | {"MASTER_PORT": "1"}).rank == 3
    with pytest.raises(LaunchError, match="torchrun says rank 2 of 4, horovodrun says rank 3 of 4"):
        discover(ENV | TORCH | {"MASTER_PORT": "1", "RANK": "2"})


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(LaunchError, match="HOROVOD_SIZE='many'"):
        discover(ENV | {"HOROVOD_SIZE": "many"})
