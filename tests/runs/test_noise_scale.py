"""The gradient noise scale from the squares of gradients, its interval, and what a run folder holds of it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from matplotlib.image import imread

from tutti.config.layout import Layout
from tutti.config.plan import Plan
from tutti.report.curves import draw_curves
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal, Screen
from tutti.runs.noise_scale import (
    NoiseLog,
    NoiseScale,
    describe,
    estimate,
    noise_curve,
    ratio_interval,
    read_noise_scale,
)

finite = st.floats(-100, 100)
positive = st.floats(1e-3, 1e3)
PLAN = Plan(Layout(2), global_batch=64, per_rank_batch=32, micro_batch=16, train_samples=640, epochs=100)


@given(arrays(float, st.tuples(st.integers(2, 5), st.integers(1, 4)), elements=finite), st.integers(1, 64))
def test_the_variance_is_that_of_the_gradients_of_the_parts(parts: np.ndarray, small_batch: int) -> None:
    mean = parts.mean(axis=0)
    squares = (parts**2).sum(axis=1).mean(), (mean**2).sum()
    square, variance = estimate(*squares, small_batch, small_batch * len(parts))
    expected = small_batch * parts.var(axis=0, ddof=1).sum()
    assert variance == pytest.approx(expected, abs=1e-6)
    assert square == pytest.approx((mean**2).sum() - expected / (small_batch * len(parts)), abs=1e-6)


@given(positive, positive, st.lists(st.integers(1, 100), min_size=2, max_size=6))
def test_expected_squares_of_unequal_parts_give_back_gradient_and_variance(
    square: float, variance: float, sizes: list[int]
) -> None:
    small = square + variance * float(np.mean([1 / size for size in sizes]))
    whole = square + variance / sum(sizes)
    harmonic = 1 / float(np.mean([1 / size for size in sizes]))
    found = estimate(small, whole, harmonic, sum(sizes))
    assert found == pytest.approx((square, variance), rel=1e-6, abs=1e-9 * (small + whole) * sum(sizes))


def synthetic_steps(rng: np.random.Generator, steps: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Steps of 4 ranks of 8 samples in 20 dimensions, with a gradient of 1 and a variance of `scale`."""
    true = np.full(20, 1 / math.sqrt(20))
    ranks = true + rng.normal(0, math.sqrt(scale / 20 / 8), (steps, 4, 20))
    small, whole = (ranks**2).sum(-1).mean(1), (ranks.mean(1) ** 2).sum(-1)
    return estimate(small, whole, 8, 32)  # pyright: ignore


@pytest.mark.parametrize("steps", [60, 200])
def test_the_interval_covers_the_known_scale_of_a_synthetic_problem(steps: int) -> None:
    rng = np.random.default_rng(1)
    found = [ratio_interval(*synthetic_steps(rng, steps, 50.0)) for _ in range(200)]
    covered = sum(low <= 50 <= (high or math.inf) for _, low, high in found)
    assert 0.82 * len(found) <= covered <= 0.97 * len(found)
    values = [value for value, _, _ in found if value is not None]
    assert len(values) > 190
    assert np.median(values) == pytest.approx(50, rel=0.05)


def test_a_gradient_that_is_lost_in_the_noise_gives_a_lower_end_alone() -> None:
    rng = np.random.default_rng(2)
    value, low, high = ratio_interval(*synthetic_steps(rng, 50, 5000.0))
    assert value is None and high is None
    assert 0 < low < 5000


def event(step: int, square: float = 1.0, variance: float = 50.0, **more: Any) -> dict[str, Any]:
    values = {"gradient_square": square, "gradient_variance": variance, "batch": 64, "time": 0.0}
    return {"event": "noise", "step": step, "epoch": 1} | values | more


def write_events(folder: Path, events: list[dict[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return folder


def test_a_run_without_enough_measured_steps_has_none(tmp_path: Path) -> None:
    assert read_noise_scale(tmp_path) is None
    assert read_noise_scale(write_events(tmp_path, [event(10 * step) for step in range(1, 20)])) is None
    assert noise_curve(tmp_path) == []


def test_a_run_is_judged_by_the_last_part_of_its_steps(tmp_path: Path) -> None:
    events = [event(10 * step, variance=10.0 if step <= 300 else 70.0) for step in range(1, 601)]
    write_events(tmp_path, [*events, {"event": "noise", "step": 6010}, event(6020, math.nan)])
    assert read_noise_scale(tmp_path) == NoiseScale(70.0, 70.0, 70.0, 64, 300, ())
    curve = noise_curve(tmp_path, most_points=4)
    assert [(step, scale.value) for step, scale in curve] == [(1500, 10.0), (3000, 10.0), (4500, 70.0), (6000, 70.0)]
    assert len(noise_curve(tmp_path)) == 12


def test_a_gradient_without_any_signal_is_larger_than_the_batch(tmp_path: Path) -> None:
    write_events(tmp_path, [event(10 * step, -1.0, biased=["batch norm"]) for step in range(1, 31)])
    assert read_noise_scale(tmp_path) == NoiseScale(None, 64.0, None, 64, 30, ("batch norm",))


def test_lines_for_people() -> None:
    assert describe(NoiseScale(1230.4, 980.2, 1600.0, 128, 240, ())) == (
        "noise scale 1,230 samples (980 to 1,600) at batch 128, over 240 measured steps"
    )
    assert describe(NoiseScale(None, 980.0, None, 128, 240, ("batch norm",))) == (
        "noise scale larger than 980 samples at batch 128, over 240 measured steps; the interval of the squared "
        "gradient contains 0: measure more steps, or at a larger batch; biased by batch norm"
    )
    assert describe(None).endswith("Train 200 steps or more.")


def test_steps_are_written_once_and_continued_after_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    journal = Journal(folder, Screen(1000, 100, 2))
    log = NoiseLog(PLAN, folder, journal, ["batch norm"], is_first=True)
    assert log.share({10: [4.0, 2.0], 20: [math.inf, 2.0]}) == [2.0, 1.0, math.inf, 1.0]
    log.write([4.0, 2.0, math.inf, 2.0])
    again = NoiseLog(PLAN, folder, journal, ["batch norm"], is_first=True)
    again.share({30: [8.0, 5.0]})
    again.write([8.0, 5.0])
    journal.close()
    events = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [(each["step"], each["epoch"]) for each in events] == [(10, 1), (30, 3)]
    assert [(each["gradient_square"], each["gradient_variance"]) for each in events] == [(0.0, 128.0), (2.0, 192.0)]
    assert [each.get("noise_scale") for each in events] == [None, 160.0]  # the ratio of the sums so far
    assert all(each["batch"] == 64 and each["biased"] == ["batch norm"] for each in events)
    assert capsys.readouterr().out == ""


def test_curves_have_a_panel_with_the_noise_scale(tmp_path: Path) -> None:
    step = {"event": "step", "epoch": 1, "loss": 1.0, "lr": 0.1, "samples_per_second": 10.0, "seconds": 1.0}
    steps = [step | {"step": number} for number in (10, 20)]
    widths = []
    for events in (steps, [*steps, event(10)], [*steps, *(event(10 * n, (-1) ** n + 0.5 * n) for n in range(1, 90))]):
        drawn = draw_curves(RunFolder(write_events(tmp_path, events)))
        assert drawn is not None
        widths.append(imread(drawn).shape[1])
    assert widths[1] == widths[2] > widths[0]
