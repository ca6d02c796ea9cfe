"""The points of sweeps: the grid, seeds, micro-batches, and combinations that cannot run."""

import pytest

from tutti.errors import ConfigError
from tutti.study.checking import describe_values
from tutti.study.definition import Goal
from tutti.study.sweep import SweepAxis, SweepGrid, read_axes, split_values, sweep_points

FULL = Goal("full")


def plan(*axes: str, overrides=(), skip=False, **grid):
    return sweep_points("digits", overrides, SweepGrid(read_axes(axes), **grid), FULL, skip)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("64,256", ["64", "256"]),
        ("[64],[128,64]", ["[64]", "[128,64]"]),
        ("{a: 1, b: 2}, null", ["{a: 1, b: 2}", "null"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("5", ["5"]),
        ("1e-3, 3e-3", ["1e-3", "3e-3"]),
        ("[[1, 2], [3]],[]", ["[[1, 2], [3]]", "[]"]),
        ("\"a]\",'it''s, b'", ['"a]"', "'it''s, b'"]),
        ("it's,ok", ["it's", "ok"]),
        ("a/b,pack.module:Net,a:b", ["a/b", "pack.module:Net", "a:b"]),
        ("${SCRATCH}/a,${SCRATCH}/b", ["${SCRATCH}/a", "${SCRATCH}/b"]),
        ("${DATA:-/a,b}/c,d", ["${DATA:-/a,b}/c", "d"]),
        ("null,true,~", ["null", "true", "~"]),
        ("2026-01-01, -1", ["2026-01-01", "-1"]),
        ("a: 1, b", ["a: 1", "b"]),
        ("", []),
        ("64,", []),
        ("64,,128", []),
        ("[64", []),
        ("64]", []),
        ("64],[128", []),
        ("[" * 5000, []),
    ],
)
def test_values_are_split_at_commas_outside_of_brackets(text, values) -> None:
    assert split_values(text) == values


def test_the_grid_is_every_combination_one_seed_after_another() -> None:
    found, _ = plan("batch.global=64,128", "schedule.scaling=none,linear", overrides=["batch.base=64"], seeds=2)
    names = ["64_none", "64_linear", "128_none", "128_linear"]
    assert [each.point.id for each in found] == [f"{name}-r{repeat}" for repeat in (1, 2) for name in names]
    assert found[3].point.values == {"batch.global": 128, "schedule.scaling": "linear"}
    assert [each.config.seed for each in found] == [42] * 4 + [43] * 4
    assert found[3].config.batch.global_batch == 128


def test_values_may_be_lists() -> None:
    found, _ = sweep_points("digits/mlp", [], SweepGrid(read_axes(["model.hidden=[64],[128,64]"])), FULL, False)
    assert [each.config.plain()["model"]["hidden"] for each in found] == [[64], [128, 64]]
    assert [each.point.id for each in found] == ["64-r1", "128-64-r1"]


def test_keys_that_belong_together_vary_together() -> None:
    found, _ = plan("optim={name: sgd, lr: 0.1},{name: adamw, lr: 1e-3}")
    assert [(each.config.optim.name, each.config.optim.lr) for each in found] == [("sgd", 0.1), ("adamw", 0.001)]
    assert describe_values(found[0].point.values) == "optim={name: sgd, lr: 0.1}"


def test_values_that_make_no_names_are_numbered() -> None:
    found, _ = plan("recipe=a/b,a:b", "epochs=1,2")
    assert [each.point.id for each in found] == ["001-r1", "002-r1", "003-r1", "004-r1"]


def test_a_large_batch_on_few_ranks_is_taken_in_passes() -> None:
    found, _ = plan("batch.global=32,256,1024", ranks=2, micro=64)
    assert [each.config.batch.micro for each in found] == [None, 64, 64]


def test_combinations_that_cannot_be_are_named() -> None:
    with pytest.raises(ConfigError) as raised:
        plan("schedule.warmup_epochs=0,30", "batch.global=64,2048")
    text = str(raised.value)
    assert text.startswith("3 of 4 points cannot run:")
    assert "schedule.warmup_epochs=30 batch.global=64: a warm-up of 660 steps is longer than the whole run" in text
    assert "a global batch of 2048 is larger than the 1437 training samples" in text
    assert text.endswith("Leave out the points that cannot run with --skip-impossible.")


def test_combinations_that_cannot_be_are_left_out_if_asked() -> None:
    found, left_out = plan("schedule.warmup_epochs=0,30", "batch.global=64,2048", skip=True)
    assert [each.point.id for each in found] == ["0_64-r1"]
    assert [fault.what for fault in left_out] == [
        "schedule.warmup_epochs=0 batch.global=2048",
        "schedule.warmup_epochs=30 batch.global=64",
        "schedule.warmup_epochs=30 batch.global=2048",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan(), "a sweep without --set has one point"),
        (lambda: plan("batch.global="), "--set 'batch.global=': expected KEY=VALUE,VALUE"),
        (lambda: plan("batch.global=64,,128"), "--set 'batch.global=64,,128': expected KEY=VALUE"),
        (lambda: plan("batch.global"), "--set 'batch.global': expected KEY=VALUE"),
        (lambda: plan("epochs=1", "epochs=2"), "--set epochs=... is given 2 times"),
        (lambda: plan("optim.lr=1e-3,0.001"), "names 0.001 twice"),
        (lambda: plan("batch.gloabl=64,128", skip=True), "unknown key 'batch.gloabl'.* Did you mean 'global'"),
        (lambda: plan("schedule.scaling=none,liner", skip=True), "1 of 2 points.*\n.*Did you mean 'linear'"),
        (lambda: plan("batch.global=4096", skip=True), "a global batch of 4096 is larger"),
        (lambda: plan("seed=1,2", seeds=2), "--seeds 2 with --set seed=...: expected one of them"),
        (lambda: plan("epochs=1,2", seeds=0), "--seeds 0: expected 1 or more"),
        (lambda: plan("epochs=1,2", micro=0), "--micro 0: expected 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(call, message) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_an_axis_keeps_values_as_they_were_written() -> None:
    assert read_axes(["optim.lr=1e-3,3e-3"]) == (SweepAxis("optim.lr", ("1e-3", "3e-3")),)
