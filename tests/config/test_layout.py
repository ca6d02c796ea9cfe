"""Layouts of ranks: degrees that divide, what is used on fewer ranks, and what is refused before anything starts."""

import math
from typing import Any

import pytest
from conftest import Call
from hypothesis import given
from hypothesis import strategies as st

from tutti.config.layout import Layout, make_layout
from tutti.config.load import resolve_values
from tutti.config.schema import ParallelConfig
from tutti.errors import ConfigError

MODEL: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp"},
    "optim": {"name": "sgd", "lr": 0.1},
    "batch": {"global": 64},
    "epochs": 1,
}


def layout(ranks: int, local_size: int | None = None, **parallel: Any) -> Layout:
    return make_layout(ParallelConfig(**parallel), ranks, local_size)


def test_without_degrees_every_rank_has_its_own_samples_and_all_weights() -> None:
    found = layout(8)
    assert (found.data_ranks, found.copies, found.shard, found.is_data_parallel) == (8, 8, 1, True)
    assert found.line() == "8 ranks = 8 data"


@pytest.mark.parametrize(
    ("ranks", "parallel", "line"),
    [
        (64, {"space": (2, 2, 2)}, "64 ranks = 8 data x 8 space [2, 2, 2]"),
        (8, {"shard": "all"}, "8 ranks = 8 data; weights sharded over 8 ranks"),
        (8, {"shard": 2}, "8 ranks = 8 data; weights sharded over 2 ranks"),
        (8, {"shard": "all", "space": 2}, "8 ranks = 4 data x 2 space [2]; weights sharded over 8 ranks"),
        (8, {"stages": 4}, "8 ranks = 2 data x 4 stages"),
        (8, {"tensor": 2, "shard": "all"}, "8 ranks = 4 data x 2 tensor; weights sharded over 4 ranks"),
        (8, {"sequence": 2, "shard": "all"}, "8 ranks = 4 data x 2 sequence; weights sharded over 8 ranks"),
    ],
)
def test_the_data_degree_is_what_the_others_leave(ranks: int, parallel: dict[str, Any], line: str) -> None:
    assert layout(ranks, **parallel).line() == line


def test_within_hosts_weights_are_sharded_over_the_ranks_of_a_host() -> None:
    assert layout(16, local_size=4, shard="host").shard == 4
    assert layout(16, local_size=4, shard="host", tensor=2).shard == 2
    assert layout(6, local_size=4, shard="host").shard == 2, "hosts with different numbers of ranks"
    assert layout(4, shard="host").shard == 4


@pytest.mark.parametrize(
    ("ranks", "parallel", "used"),
    [
        (1, {"space": (2, 2, 1), "shard": "all"}, "parallel.space=[2,2,1] on 1 rank: no split is used"),
        (2, {"space": (2, 2, 1)}, "parallel.space=[2,2,1] on 2 ranks: parallel.space=[2,1,1] is used"),
        (2, {"stages": 4}, "parallel.stages=4 on 2 ranks: parallel.stages=2 is used"),
        (2, {"sequence": 4}, "parallel.sequence=4 on 2 ranks: parallel.sequence=2 is used"),
        (2, {"shard": 4}, "parallel.shard=4 on 2 ranks with the same layers: 2 is used"),
    ],
)
def test_on_fewer_ranks_than_asked_what_divides_is_used_and_said(
    ranks: int, parallel: dict[str, Any], used: str
) -> None:
    assert layout(ranks, **parallel).notes == (used,)


@pytest.mark.parametrize(
    ("ranks", "parallel", "said"),
    [
        (6, {"space": 4}, "parallel.space=4 on 6 ranks: expected a multiple of 4 ranks. Start 4 or 8 ranks"),
        (3, {"tensor": 4}, "parallel.tensor=4 on 3 ranks: expected a multiple of 4 ranks. Start 4 ranks"),
        (6, {"shard": 4}, "parallel.shard=4 on 6 ranks with the same layers: expected a divisor of 6"),
        (3, {"shard": 4}, "Set parallel.shard=3, or parallel.shard=all"),
    ],
)
def test_where_nothing_divides_the_nearest_is_named(ranks: int, parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        layout(ranks, **parallel)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"parallel": {"shard": 0}}, "parallel.shard"),
        ({"parallel": {"shard": "half"}}, "parallel.shard"),
        ({"parallel": {"stages": -1}}, "parallel.stages"),
        ({"parallel": {"space": [2, 0, 1]}}, "parallel.space"),
        ({"parallel": {"space": [2, 2, 2, 2]}}, "parallel.space"),
        ({"parallel": {"recompute": -2.0}}, "parallel.recompute"),
        ({"parallel": {"shard": "all"}, "ddp": {"bucket_mb": 10.0}}, "ddp.bucket_mb=10.0 with parallel.shard"),
        ({"parallel": {"shard": "all"}, "log": {"noise_scale": True}}, "log.noise_scale=true with parallel.shard"),
        ({"parallel": {"shard": "all"}, "speed": {"graphs": True}}, "speed.graphs=true with parallel.shard"),
        ({"parallel": {"space": 2, "stages": 2}}, "parallel.space with parallel.stages: expected one of them"),
    ],
)
def test_what_has_no_meaning_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_values(MODEL | values)
    assert said in str(error.value)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_every_rank_has_one_place(data: int, depth: int, height: int, stages: int, tensor: int) -> None:
    found = Layout(data * depth * height * stages * tensor, 1, (depth, height), stages, tensor)
    places = [
        (found.data_rank(rank), found.space_rank(rank), found.stage(rank), found.tensor_rank(rank))
        for rank in range(found.world_size)
    ]
    assert len(set(places)) == found.world_size
    assert [max(each) + 1 for each in zip(*places, strict=True)] == [data, depth * height, stages, tensor]
    assert sum(found.owns_samples(rank) for rank in range(found.world_size)) == found.data_ranks == data
    assert math.prod((found.copies, stages, tensor)) == found.world_size


def test_show_prints_the_layout(call_tutti: Call) -> None:
    shown = call_tutti("show", "digits", "-n", "8", "batch.micro=8", "parallel.shard=4")
    assert "8 ranks = 8 data; weights sharded over 4 ranks" in shown[1]
    assert "parallel.shard=4 on 2 ranks" in call_tutti("show", "digits", "-n", "2", "parallel.shard=4")[1]


def test_show_prints_batch_and_rates_before_the_samples_are_counted(call_tutti: Call) -> None:
    shown = call_tutti("show", "imagenet/resnet50", "-n", "8", "parallel.shard=2")[1].splitlines()
    assert "global batch   256 = 8 ranks x 32 (1 x 32)" in shown
    assert "layout         8 ranks = 8 data; weights sharded over 2 ranks" in shown
    assert "steps          not known before the data is read" in shown
    assert "learning rate  0.0125 first, 0.1 scaled" in shown
    shown = call_tutti("show", "imagenet/resnet50", "-n", "8", "schedule.warmup_from=zero")[1].splitlines()
    assert "learning rate  0.1 scaled" in shown
