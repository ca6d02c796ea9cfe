"""What a measurement that has not been made would do to an interval, and the sentence about a forecast."""

import re
from dataclasses import replace

import pytest
from scaling_curves import ring, weak_curve

from tutti.forecast.curve import MeasuredRun
from tutti.forecast.forecast import FittedCurve, fit_curve, forecast
from tutti.forecast.link import KnownLink
from tutti.forecast.planning import LEAST_GAIN, conclude_forecast, expect_measurement, propose_measurement
from tutti.forecast.population import Fabric


def fitted(share: float, *nodes: int, fabric: Fabric | None = Fabric.HPC) -> FittedCurve:
    return fit_curve(weak_curve(ring(share), nodes or (1, 2)), fabric)


def said(share: float, *nodes: int, fabric: Fabric | None = Fabric.HPC) -> list[str]:
    found = fitted(share, *nodes, fabric=fabric)
    most = found.curve.measurements[-1].ranks
    made = forecast(found, [most * times for times in (2, 4, 8, 16)], 0.8)
    return conclude_forecast(found, made, 0.8, fabric, measured_steps=120)


@pytest.mark.parametrize("fabric", [*Fabric, None])
def test_the_expected_width_is_that_of_the_measurement_when_it_is_made(fabric: Fabric | None) -> None:
    before = fitted(0.1, fabric=fabric)
    expected = expect_measurement(before, fabric, 64, 8)
    assert (expected.nodes, expected.ranks) == (8, 32)
    likely = forecast(before, [32])[0].samples_per_second
    runs = (*before.curve.measurements, MeasuredRun(32, 8, likely))
    after = fit_curve(replace(before.curve, measurements=runs), fabric)
    widths = [one.interval90[1] - one.interval90[0] for each in (before, after) for one in forecast(each, [64])]
    assert expected.width_ratio == pytest.approx(widths[1] / widths[0], abs=0.12)
    assert 0.2 < expected.width_ratio < 1
    assert expected.step_seconds == pytest.approx(32 * 32 / likely, rel=1e-6)


def test_a_measurement_near_the_question_narrows_more_but_may_cost_more() -> None:
    found = fitted(0.1)
    near, far = (expect_measurement(found, Fabric.HPC, 64, nodes) for nodes in (8, 4))
    assert near.gain > far.gain > LEAST_GAIN
    chosen = propose_measurement(found, Fabric.HPC, 64)
    assert chosen is not None
    assert chosen.gain / chosen.nodes == pytest.approx(max(near.gain / 8, far.gain / 4))


def test_nothing_is_proposed_between_neighbours() -> None:
    assert propose_measurement(fitted(0.1), Fabric.HPC, 16) is None
    third = propose_measurement(fitted(0.1, fabric=Fabric.TCP), Fabric.TCP, 16)
    assert third is not None
    assert third.nodes == 3


def test_an_open_case_names_the_measurement_that_would_decide_it() -> None:
    [sentence] = said(0.1)
    share = r"\d+% \(\d+% to \d+%\)"
    assert re.fullmatch(
        r"Forecast of efficiency from measurements on 1, 2 nodes, HPC fabric, with 90% intervals: "
        rf"on 4 nodes {share}; on 8 nodes {share}, too close to 80% to tell; measuring 4 nodes for about 3 min is "
        r"expected to (halve|take \d+% off) the interval of 8 nodes\.",
        sentence,
    )


def test_no_measurement_of_nodes_is_proposed_where_the_link_is_known() -> None:
    curve = weak_curve(ring(0.2), (1, 2))
    told = [replace(run, exposed_seconds=0.2 * (run.nodes > 1), reading_seconds=0.0) for run in curve.measurements]
    link = KnownLink("200Gbit,3us", 0.04, lambda ranks: 0.2)
    found = fit_curve(replace(curve, measurements=tuple(told)), Fabric.HPC, link)
    assert found.by_parts is not None
    made = forecast(found, [32], 0.8)
    sentence = conclude_forecast(found, [replace(made[0], above=0.5)], 0.8, Fabric.HPC, 120)[0]
    assert sentence.endswith("too close to 80% to tell.")
    assert "link 200Gbit,3us" in sentence


def test_clear_cases_are_stated_alone() -> None:
    [above] = said(0.02, 1, 2, 4)
    assert "too close" not in above
    assert "on 64 nodes " in above
    [below] = said(0.4)
    assert re.search(r": on 4 nodes \d+% \(\d+% to \d+%\)\.$", below)


def test_wide_intervals_bear_no_sentence() -> None:
    [cut] = said(0.1, fabric=Fabric.TCP)
    assert "on 8 nodes" not in cut
    found = fitted(0.0, 2, fabric=Fabric.TCP)
    far = forecast(found, [16 * found.curve.measurements[-1].ranks], 0.8)
    assert conclude_forecast(found, far, 0.8, Fabric.TCP, measured_steps=120) == []
