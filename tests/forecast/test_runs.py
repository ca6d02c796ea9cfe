"""Forecasts from single runs of `tutti train` and `tutti bench`."""

from pathlib import Path

import pytest
from run_folders import bench_run, train_run

from tutti.errors import DataError
from tutti.forecast.runs import read_runs


def test_runs_of_training_are_a_curve_without_their_first_window(tmp_path: Path) -> None:
    paths = [train_run(tmp_path / str(n), n, n // 2 or 1, speed=100.0 * n) for n in (4, 1, 2)]
    found = read_runs(paths)
    assert [(each.ranks, each.nodes, each.samples_per_second) for each in found.runs] == [
        (1, 1, 100.0),
        (2, 1, 200.0),
        (4, 2, 400.0),
    ]
    step = 8 / 100
    assert found.runs[0].exposed_seconds == pytest.approx(0.15 * step)
    assert found.runs[0].reading_seconds == pytest.approx(0.1 * step)
    assert (found.mode, found.gradient_bytes) == ("weak", 1000)


def test_one_global_batch_is_strong_scaling(tmp_path: Path) -> None:
    found = read_runs([train_run(tmp_path / str(n), n, n, batch=16 // n) for n in (1, 2, 4)])
    assert found.mode == "strong"
    assert read_runs([train_run(tmp_path / "other", 2, 2)], "strong").mode == "strong"


def test_a_bench_is_a_measurement_by_its_slowest_rank(tmp_path: Path) -> None:
    [run] = read_runs([bench_run(tmp_path / "bench", 2)]).runs
    assert run.samples_per_second == pytest.approx(16 / 0.11)
    assert run.exposed_seconds == pytest.approx(0.02)
    assert (run.ranks, run.nodes, run.per_rank_batch) == (2, 1, 8)


def test_other_folders_and_recipes_are_refused(tmp_path: Path) -> None:
    one, other = train_run(tmp_path / "one", 1, 1), train_run(tmp_path / "two", 2, 2, recipe="other")
    with pytest.raises(DataError, match=r"runs of other, own are mixed: expected runs of one recipe"):
        read_runs([one, other])
    with pytest.raises(DataError, match=r"nothing is no run: expected the folder of a study"):
        read_runs([tmp_path / "nothing"])
    (one / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no measured steps"):
        read_runs([one])
