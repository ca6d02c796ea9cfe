"""The forecast of curves whose continuation is known."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_curves import flat, logarithmic, ring, weak_curve

from tutti.errors import DataError
from tutti.forecast.curve import MeasuredRun, ScalingCurve, levels_of, make_curve
from tutti.forecast.forecast import Forecast, fit_curve, forecast
from tutti.forecast.laws import exchange_growth
from tutti.forecast.link import KnownLink
from tutti.forecast.population import Fabric, shipped
from tutti.forecast.posterior import around

FEW = settings(max_examples=15, deadline=None)
FABRICS = st.sampled_from(list(Fabric))


def ask(curve: ScalingCurve, *ranks: int, fabric: Fabric | None = Fabric.HPC) -> list[Forecast]:
    return forecast(fit_curve(curve, fabric), ranks)


@pytest.mark.parametrize("law", [ring(0.2), flat(0.2), flat(0.0), ring(0.02)])
def test_exact_laws_are_continued(law) -> None:
    curve = weak_curve(law, (1, 2, 4, 8))
    for made in ask(curve, 64, 128):
        truth = made.ranks * 32 / law(made.nodes)
        assert made.samples_per_second == pytest.approx(truth, rel=0.06)
        assert made.interval90[0] < truth < made.interval90[1]


def test_a_curve_that_grows_is_told_from_one_that_does_not() -> None:
    growing, still = (ask(weak_curve(law(0.3), (1, 2, 4, 8)), 128)[0] for law in (logarithmic, flat))
    assert growing.samples_per_second < still.interval90[0]


@FEW
@given(scale=st.floats(1e-6, 1e6), fabric=FABRICS)
def test_the_unit_of_time_does_not_matter(scale: float, fabric: Fabric) -> None:
    curve = weak_curve(ring(0.3))
    other = replace(
        curve,
        measurements=tuple(replace(m, samples_per_second=m.samples_per_second * scale) for m in curve.measurements),
    )
    here, there = (ask(each, 32, 256, fabric=fabric) for each in (curve, other))
    for one, two in zip(here, there, strict=True):
        assert two.efficiency == pytest.approx(one.efficiency, rel=1e-3)
        assert two.interval90[0] == pytest.approx(scale * one.interval90[0], rel=1e-3)


@FEW
@given(order=st.permutations(range(4)), fabric=FABRICS)
def test_the_order_of_measurements_does_not_matter(order: list[int], fabric: Fabric) -> None:
    runs = weak_curve(ring(0.3), (1, 2, 3, 4)).measurements
    shuffled = make_curve([runs[place] for place in order], "weak")
    assert ask(shuffled, 64, fabric=fabric) == ask(make_curve(runs, "weak"), 64, fabric=fabric)


@FEW
@given(share=st.floats(0.0, 3.0), fabric=FABRICS)
def test_intervals_are_nested_and_widen_with_the_distance(share: float, fabric: Fabric) -> None:
    made = ask(weak_curve(ring(share)), 32, 64, 256, 1024, fabric=fabric)
    widths = [math.log(each.interval90[1] / each.interval90[0]) for each in made]
    assert widths == sorted(widths)
    for each in made:
        ends = (each.interval90[0], each.interval68[0], each.interval50[0], each.samples_per_second)
        assert list(ends) == sorted(ends)
        ends = (each.samples_per_second, each.interval50[1], each.interval68[1], each.interval90[1])
        assert list(ends) == sorted(ends)


@settings(max_examples=40, deadline=None)
@given(
    rates=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=7),
    nodes=st.lists(st.integers(1, 40), min_size=7, max_size=7, unique=True),
    per_node=st.integers(1, 8),
    mode=st.sampled_from(["weak", "strong"]),
    fabric=st.sampled_from([*Fabric, None]),
)
def test_any_curve_has_finite_ordered_numbers(rates, nodes, per_node, mode, fabric) -> None:
    sizes = sorted(nodes[: len(rates)])
    curve = make_curve(
        [MeasuredRun(k * per_node, k, k * per_node * r) for k, r in zip(sizes, rates, strict=True)], mode
    )
    asked = [ranks for ranks in (1, 3, 17, 400, 4096) if ranks >= curve.first.ranks]
    for made in ask(curve, *asked, fabric=fabric):
        ends = [made.interval90[0], made.interval68[0], made.samples_per_second, made.interval68[1], made.interval90[1]]
        assert all(map(math.isfinite, ends))
        assert ends[0] > 0
        assert ends == sorted(ends)


def test_more_measured_nodes_narrow_the_interval() -> None:
    wide, narrow = (ask(weak_curve(ring(0.3), nodes), 64)[0] for nodes in ((1, 2), (1, 2, 4, 8)))
    assert narrow.interval90[1] / narrow.interval90[0] < wide.interval90[1] / wide.interval90[0]


def test_one_outlying_measurement_is_passed_over_and_named() -> None:
    curve = weak_curve(ring(0.05), (1, 2, 4, 8))
    runs = list(curve.measurements)
    runs[2] = replace(runs[2], samples_per_second=runs[2].samples_per_second / 1.6)
    made = ask(make_curve(runs, "weak"), 64)[0]
    assert made.samples_per_second == pytest.approx(64 * 32 / ring(0.05)(16), rel=0.08)
    assert any("4 nodes" in warning and "repeat" in warning for warning in made.warnings)


def test_the_members_of_a_collective_are_nodes_on_hpc_fabrics_and_ranks_over_tcp() -> None:
    assert exchange_growth(8, 1) == pytest.approx([1, 1.75, 3])
    assert exchange_growth(8, 4) == pytest.approx([1, (31 / 32) / (7 / 8), 5 / 3])
    few, many = (weak_curve(ring(0.5), (1, 2, 4), per_node) for per_node in (1, 8))
    efficiencies = {
        fabric: [ask(curve, 16 * curve.ranks_per_node, fabric=fabric)[0].efficiency for curve in (few, many)]
        for fabric in Fabric
    }
    assert efficiencies[Fabric.HPC][0] == pytest.approx(efficiencies[Fabric.HPC][1], rel=1e-6)
    assert efficiencies[Fabric.TCP][0] < efficiencies[Fabric.TCP][1]


def test_another_width_keeps_the_median() -> None:
    wide = around(0.3, 0.05)
    narrow = wide.with_width(0.5)
    assert narrow.quantile(0.5) == pytest.approx(wide.quantile(0.5), abs=1e-9)
    reach = [each.quantile(0.95) - each.quantile(0.5) for each in (narrow, wide)]
    assert reach[0] == pytest.approx(0.5 * reach[1])


def test_one_node_shows_no_link() -> None:
    curve = make_curve([MeasuredRun(n, 1, 100.0 * n) for n in (1, 2, 4)], "weak")
    with pytest.raises(DataError, match=r"on one node \(up to 4 ranks\).*Measure 2 nodes.*--link.*--band"):
        fit_curve(curve, Fabric.HPC)
    band = forecast(fit_curve(curve, Fabric.HPC, alone=True), [16])[0]
    known = ask(weak_curve(ring(0.05), (1, 2)), 16)[0]
    assert band.interval90[1] / band.interval90[0] > 1.2 * known.interval90[1] / known.interval90[0]


def test_a_link_is_not_used_where_nodes_were_measured_without_their_parts() -> None:
    curve = weak_curve(ring(0.1), (1, 2))
    link = KnownLink("given", 0.05, lambda ranks: 5.0)
    plain, linked = (forecast(fit_curve(curve, Fabric.HPC, each), [32])[0] for each in (None, link))
    assert linked.samples_per_second == plain.samples_per_second
    assert any("link is not used" in warning for warning in linked.warnings)


def test_nodes_that_are_not_full_count_only_where_no_full_one_was_measured() -> None:
    full = [MeasuredRun(8, 1, 700.0), MeasuredRun(16, 2, 1350.0)]
    partial = [MeasuredRun(1, 1, 200.0), MeasuredRun(4, 1, 500.0)]
    made = [ask(make_curve(runs, "weak"), 64)[0].samples_per_second for runs in (full, partial + full)]
    assert made[0] == pytest.approx(made[1])
    levels = levels_of(make_curve([*partial, full[1]], "weak"), shipped()[Fabric.HPC].within_node)
    assert [level.nodes for level in levels] == [1, 2]
    assert levels[0].deviation > 0


def test_exposed_communication_stands_in_for_the_node_that_was_not_measured() -> None:
    law = ring(0.5)
    runs = [MeasuredRun(4 * k, k, 4 * k * 32 / law(k), 32) for k in (2, 4)]
    told = [replace(run, exposed_seconds=law(run.nodes) - 1) for run in runs]
    plain, informed = (ask(make_curve(each, "weak"), 64)[0] for each in (runs, told))
    truth = 64 * 32 / law(16)
    assert abs(informed.samples_per_second / truth - 1) < 0.06
    assert any("one node was not measured" in warning for warning in plain.warnings)


def test_measured_numbers_of_ranks_are_given_back_and_others_interpolated() -> None:
    runs = [MeasuredRun(1, 1, 100.0), MeasuredRun(4, 1, 380.0), MeasuredRun(8, 2, 740.0)]
    made = ask(make_curve(runs, "weak"), 1, 2, 4, 8)
    assert [each.samples_per_second for each in made] == pytest.approx([100, 195, 380, 740], rel=0.02)
    assert all(each.basis.startswith("interpolated between") for each in made)


def test_fewer_ranks_than_any_measured_are_refused() -> None:
    with pytest.raises(DataError, match=r"2 ranks: fewer than any measured.*expected 4 or more.*Measure 2"):
        ask(weak_curve(ring(0.1)), 16, 2)


def test_strong_scaling_separates_the_fixed_part_of_compute() -> None:
    def step(ranks: int) -> float:
        return 0.05 + 0.95 / ranks + 0.02 * (ranks > 4)

    runs = [MeasuredRun(n, max(1, n // 4), 1024 / step(n)) for n in (4, 8, 16, 32)]
    made = ask(make_curve(runs, "strong"), 64)[0]
    assert made.interval90[0] < 1024 / step(64) < made.interval90[1]
    assert made.samples_per_second == pytest.approx(1024 / step(64), rel=0.12)
    assert any("per-rank batch" in warning for warning in made.warnings)


def test_the_probability_of_an_efficiency_follows_the_interval() -> None:
    fitted = fit_curve(weak_curve(ring(0.1)), Fabric.HPC)
    middle = forecast(fitted, [64])[0].efficiency
    above = [forecast(fitted, [64], threshold)[0].above or 0.0 for threshold in (0.3, middle, 0.999)]
    assert above[0] > 0.99
    assert above[1] == pytest.approx(0.5, abs=0.03)
    assert above[2] < 0.1


@pytest.mark.parametrize("fabric", [*Fabric, None])
def test_an_interval_holds_the_share_that_it_is_named_by(fabric: Fabric | None) -> None:
    curve = weak_curve(ring(0.3))
    fitted = fit_curve(curve, fabric)
    ideal = 64 * curve.first.samples_per_second / curve.first.ranks
    made = forecast(fitted, [64])[0]
    for share, ends in ((0.9, made.interval90), (0.68, made.interval68), (0.5, made.interval50)):
        low, high = (forecast(fitted, [64], end / ideal)[0].above for end in ends)
        assert low == pytest.approx((1 + share) / 2, abs=0.005)
        assert high == pytest.approx((1 - share) / 2, abs=0.005)


def test_an_unknown_fabric_lies_between_the_two_and_says_so() -> None:
    curve = weak_curve(ring(0.2), (1, 2))
    hpc, tcp, unknown = (ask(curve, 32, fabric=each)[0] for each in (Fabric.HPC, Fabric.TCP, None))
    ends = sorted((hpc.samples_per_second, tcp.samples_per_second))
    assert ends[0] * 0.99 <= unknown.samples_per_second <= ends[1] * 1.01
    assert any("--fabric" in warning for warning in unknown.warnings)
    assert any("3 or 4 nodes" in warning for warning in tcp.warnings)
    assert not hpc.warnings


def test_no_rank_is_faster_than_the_best_measured_one() -> None:
    for fabric in Fabric:
        far = ask(weak_curve(flat(0.0)), 4096, fabric=fabric)[0]
        assert far.interval90[1] / 4096 < 1.15 * 32
        assert far.interval90[0] < far.samples_per_second <= far.interval90[1]


def test_far_forecasts_name_what_is_not_in_them() -> None:
    near, far = ask(weak_curve(ring(0.1)), 64, 4096)
    assert not near.warnings
    assert any("256 times" in warning for warning in far.warnings)
    assert far.extrapolation == 256
