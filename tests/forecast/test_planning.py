"""What a measurement that has not been made would do to an interval, and the sentence about a forecast."""

from dataclasses import replace

import pytest
from scaling_curves import ring, weak_curve

from tutti.forecast.curve import MeasuredRun
from tutti.forecast.forecast import FittedCurve, fit_curve, forecast
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
    assert said(0.1) == [
        "Forecast of efficiency from measurements on 1, 2 nodes, HPC fabric, with 90% intervals: on 4 nodes 86% "
        "(79% to 94%); on 8 nodes 83% (71% to 94%), too close to 80% to tell; measuring 4 nodes for about 3 min is "
        "expected to halve the interval of 8 nodes."
    ]


def test_clear_cases_are_stated_alone() -> None:
    [above] = said(0.02, 1, 2, 4)
    assert "too close" not in above
    assert "on 64 nodes 91%" in above
    [below] = said(0.4)
    assert below.endswith("on 4 nodes 62% (53% to 72%).")


def test_wide_intervals_bear_no_sentence() -> None:
    [cut] = said(0.1, fabric=Fabric.TCP)
    assert "on 8 nodes" not in cut
    assert said(0.0, 2, fabric=Fabric.TCP) == []
