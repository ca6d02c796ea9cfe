"""The bottleneck of a step in one sentence, or an inconclusive verdict."""

import json

import pytest
from made_up import by_rank, by_trial, made_up

from tutti.bench.results import Ceilings, Measurement, Work
from tutti.bench.verdict import judge


def work(**values: float | tuple[str, ...]) -> Work:
    given = {"flops": 0.0, "bytes_moved": 0.0, "least_bytes": 0.0, "operators": 10, "synchronisations": 0}
    return Work(**given | values)  # pyright: ignore[reportArgumentType]


UNIT = (Ceilings(1.0, 1.0),)  # a flop and a byte are a second each


@pytest.mark.parametrize(
    ("parts", "bound"),
    [
        ({"data": 0.7, "computing": 0.3}, "data loading"),
        ({"data": 0.1, "computing": 0.9}, "compute"),
        ({"computing": 0.3, "communication": 0.7}, "communication"),
        ({"computing": by_rank(0.3, 1.0)}, "straggler"),
        ({"data": by_rank(1.0, 0.1), "computing": 0.2}, "straggler"),
        ({"computing": 0.3, "rest": 0.7}, "host"),
        ({"data": 0.46, "computing": 0.54}, "balanced"),
        ({"computing": 0.5, "communication": 0.5}, "balanced"),
    ],
)
def test_the_largest_part_bounds_a_step(parts: dict[str, float], bound: str) -> None:
    assert judge(made_up(ranks=2, **parts)).bound == bound  # pyright: ignore[reportArgumentType]


def test_data_loading_is_named_with_the_possible_gain_and_a_suggestion() -> None:
    verdict = judge(made_up(data=0.71, computing=0.29, batches_are_samples=True))
    assert verdict.sentence == (
        "bound by data loading: 71% of a step waits for batches; at most 3.4 times as fast; try data.workers=4"
    )
    assert verdict.gain == pytest.approx(1 / 0.29)


def test_communication_is_named() -> None:
    verdict = judge(made_up(ranks=2, computing=0.4, communication=0.6, gradient_bytes=200 << 20))
    assert verdict.sentence == (
        "bound by communication: 60% of a step is exposed communication; at most 2.5 times as fast; "
        "try ddp.bucket_mb=100"
    )


def test_a_straggler_is_named_with_its_host_and_what_it_is_slow_in() -> None:
    verdict = judge(made_up(ranks=3, data=0.1, computing=by_rank(0.4, 0.4, 1.4)))
    assert verdict.sentence == (
        "bound by a straggler: 67% of a step waits for rank 2 on host2; at most 3.0 times as fast; "
        "examine rank 2 on host2, for example with tutti doctor"
    )
    assert any(
        line == "rank 2 on host2 is the straggler: 3.00 times the time of the others without waiting; "
        "3.50 times for compute alone; 1.00 times for data loading alone"
        for line in verdict.measurements
    )


def test_a_rank_that_loads_data_slowly_is_in_the_measurements() -> None:
    measurements = "\n".join(judge(made_up(ranks=2, data=by_rank(0.1, 2.0), computing=0.2)).measurements)
    assert "20.00 times for data loading alone" in measurements
    assert "1.00 times for compute alone" in measurements


def test_balanced_parts_are_both_named() -> None:
    verdict = judge(made_up(data=0.47, computing=0.53, batches_are_samples=True))
    assert verdict.sentence.startswith(
        "balanced: compute (53%) and data loading (47%) take about as long; at most 2.1 times as fast by either alone; "
    )
    overrides = [each.overrides for each in verdict.suggestions]
    assert ("data.workers=2",) in overrides
    assert ("speed.compile=true",) in overrides


def test_a_lead_within_the_spread_is_inconclusive() -> None:
    parts = {"data": by_trial(0.2, 0.35, 0.5, 0.35, 0.2), "computing": by_trial(0.5, 0.45, 0.42, 0.5, 0.7)}
    verdict = judge(made_up(**parts))  # pyright: ignore[reportArgumentType]
    assert verdict.bound == "unclear"
    assert verdict.sentence == (
        "inconclusive: compute exceeds data loading by less than the spread of the trials; "
        "try --trials 9 or a quiet machine"
    )
    assert verdict.gain is None
    assert verdict.suggestions == ()


def test_trials_that_disagree_are_inconclusive() -> None:
    parts = {"data": by_trial(0.8, 0.2, 0.8, 0.2, 0.8), "computing": by_trial(0.2, 0.8, 0.2, 0.8, 0.2)}
    verdict = judge(made_up(**parts))  # pyright: ignore[reportArgumentType]
    assert verdict.bound == "unclear"
    assert "the largest part of a step changes from trial to trial" in verdict.sentence


def test_one_trial_of_five_may_disagree() -> None:
    parts = {"data": by_trial(0.8, 0.8, 0.1, 0.8, 0.8), "computing": by_trial(0.2, 0.2, 0.9, 0.2, 0.2)}
    assert judge(made_up(**parts)).bound == "data loading"  # pyright: ignore[reportArgumentType]


def test_one_trial_of_three_may_not() -> None:
    parts = {"data": by_trial(0.8, 0.8, 0.1), "computing": by_trial(0.2, 0.2, 0.9)}
    assert judge(made_up(trials=3, **parts)).bound == "unclear"  # pyright: ignore[reportArgumentType]


def test_close_parts_that_take_turns_are_balanced() -> None:
    parts = {"data": by_trial(0.48, 0.52, 0.5, 0.47, 0.53), "computing": by_trial(0.52, 0.48, 0.5, 0.53, 0.47)}
    assert judge(made_up(**parts)).bound == "balanced"  # pyright: ignore[reportArgumentType]


def test_steps_that_differ_widely_are_inconclusive() -> None:
    verdict = judge(made_up(data=by_trial(1.0, 2.0, 3.0, 1.0, 2.0), computing=0.1))
    assert verdict.bound == "unclear"
    assert verdict.sentence.startswith(
        "inconclusive: the interquartile range of 5 trials is 48% of the median; try --trials"
    )


def test_ranks_that_are_slow_in_turn_are_no_straggler() -> None:
    verdict = judge(made_up(ranks=2, computing=lambda rank, trial: 1.0 if rank == trial % 2 else 0.3))
    assert verdict.bound == "unclear"
    assert "the straggler changes from trial to trial" in verdict.sentence


def test_a_rank_that_is_late_in_steps_and_not_alone_is_no_straggler() -> None:
    found = made_up(ranks=2, computing=by_rank(0.3, 1.0), phases={"compute": 0.3})
    verdict = judge(found)
    assert verdict.bound == "unclear"
    assert "rank 1 is late in a step, but takes no longer than others alone" in verdict.sentence


def test_one_trial_is_judged_as_it_is() -> None:
    assert judge(made_up(trials=1, data=0.8, computing=0.2)).bound == "data loading"


@pytest.mark.parametrize(
    ("counted", "settings", "bound"),
    [
        (work(bytes_moved=0.6, flops=0.1), (), "memory"),
        (work(bytes_moved=0.6, flops=0.7), (), "compute"),
        (work(bytes_moved=0.35), (), "compute"),
        (work(bytes_moved=0.6, least_bytes=0.1), ("speed.compile=true",), "compute"),
        (work(bytes_moved=0.6, least_bytes=0.6), ("speed.compile=true",), "memory"),
        (work(host_share=0.6), (), "host"),
        (work(host_share=0.4), (), "compute"),
        (work(host_share=0.4, synchronisations=20), (), "host"),
        (work(host_share=0.4, synchronisations=2), (), "compute"),
        (work(host_share=0.2, synchronisations=20), (), "compute"),
        (work(bytes_moved=0.6, host_share=0.9), (), "host"),
    ],
)
def test_compute_is_limited_by_arithmetic_memory_or_the_host(
    counted: Work, settings: tuple[str, ...], bound: str
) -> None:
    assert judge(made_up(*settings, computing=1.0, work=counted, ceilings=UNIT)).bound == bound


def test_one_synchronisation_drains_a_gpu() -> None:
    assert judge(made_up(computing=1.0, device="cuda", work=work(host_share=0.4, synchronisations=1))).bound == "host"


@pytest.mark.parametrize(("double", "bound"), [(1.2, "host"), (1.5, "host"), (1.6, "compute"), (2.5, "compute")])
def test_a_batch_twice_as_large_that_costs_hardly_more_says_host(double: float, bound: str) -> None:
    assert judge(made_up(computing=1.0, phases={"double": double})).bound == bound


@pytest.mark.parametrize(
    ("double", "operators", "synchronisations", "bound"),
    [(1.9, 100, 0, "compute"), (1.7, 100, 0, "host"), (1.9, 100, 20, "host"), (1.9, 50_000, 0, "host")],
)
def test_long_operators_that_grow_with_the_batch_leave_no_device_idle(
    double: float, operators: int, synchronisations: int, bound: str
) -> None:
    counted = work(host_share=1.0, operators=operators, synchronisations=synchronisations)
    assert judge(made_up(computing=1.0, phases={"double": double}, work=counted)).bound == bound


def test_data_loading_is_not_refined() -> None:
    assert judge(made_up(data=0.8, computing=0.2, work=work(host_share=0.9))).bound == "data loading"


def test_lines_that_synchronise_are_in_the_measurements() -> None:
    counted = work(host_share=0.7, synchronisations=12, synchronises_at=("model.py:12, 12 a step",))
    verdict = judge(made_up(computing=1.0, work=counted))
    assert (
        "bound by the host: the device is idle for 70% of the compute time; the host synchronizes with it 12 times"
        in (verdict.sentence)
    )
    assert "the host synchronizes with the device 12 times a step: model.py:12, 12 a step" in verdict.measurements
    assert verdict.suggestions[0].overrides == ()
    assert "model.py:12" in verdict.suggestions[0].why


def test_a_small_batch_is_named_as_the_cause() -> None:
    verdict = judge(made_up(computing=1.0, phases={"double": 1.1}))
    assert verdict.sentence.startswith("bound by the host: 90% of the compute time does not depend on the batch")
    assert verdict.gain == pytest.approx(10.0)


def test_time_outside_of_all_parts_is_named() -> None:
    sentence = judge(made_up(computing=0.2, rest=0.8)).sentence
    assert sentence.startswith("bound by the host: 80% of a step is outside of data loading, compute and communication")


def test_the_gain_of_memory_is_limited_by_the_least_bytes() -> None:
    verdict = judge(made_up(computing=1.0, work=work(bytes_moved=0.8, least_bytes=0.25), ceilings=UNIT))
    assert verdict.sentence.startswith(
        "bound by memory bandwidth: 100% of a step is compute, and 80% of that is memory traffic"
    )
    assert verdict.gain == pytest.approx(4.0)


def test_the_gain_of_compute_is_limited_by_the_peak() -> None:
    assert judge(made_up(computing=1.0, work=work(flops=0.5), ceilings=UNIT)).gain == pytest.approx(2.0)


def test_compute_without_a_measured_peak_has_no_gain() -> None:
    verdict = judge(made_up(computing=1.0))
    assert verdict.gain is None
    assert "at most" not in verdict.sentence


def test_a_suggestion_that_changes_learning_is_marked() -> None:
    found = made_up("speed.compile=true", "speed.graphs=true", recipe="mnist", computing=1.0, device="cuda")
    assert judge(found).sentence.endswith("try precision=bf16 (changes the precision)")


@pytest.mark.parametrize(
    "found",
    [
        made_up(),
        made_up(seconds={}, parts={}),
        made_up(ranks=2, computing=1.0, parts={}),
        made_up(data=1.0),
        made_up(computing=1.0, work=work(host_share=1.0), ceilings=(Ceilings(0.0, 0.0),)),
        made_up(computing=1.0, hosts=(), phases={"compute": 0.0, "double": 0.0}),
        made_up(computing=by_rank(0.0, 1.0), ranks=2, hosts=(), cores=0, local_ranks=0),
    ],
)
def test_partial_measurements_are_judged_without_a_division_by_zero(found: Measurement) -> None:
    verdict = judge(found)
    assert verdict.sentence
    json.dumps(verdict.content())


def test_without_a_step_there_are_no_measurements() -> None:
    assert judge(made_up(seconds={}, parts={})).sentence.startswith("inconclusive: no whole step was measured")


def test_the_measurements_have_the_numbers() -> None:
    found = made_up(
        ranks=2,
        data=0.1,
        computing=0.5,
        communication=0.2,
        phases={"read": 0.3, "exchange": 0.5, "double": 0.95},
        work=work(flops=0.2, bytes_moved=0.1),
        ceilings=UNIT * 2,
    )
    assert list(judge(found).measurements) == [
        "a step takes 800 ms (spread 0% over 5 trials): "
        "data loading 12%, compute 62%, communication 25%, straggler 0%, other 0%",
        "loading a batch takes 300 ms alone; 100 ms are exposed in a step, 200 ms are hidden",
        "averaging the gradients takes 500 ms alone; 200 ms are exposed in a step, 300 ms are hidden",
        "a step would take 300 ms without compute, 700 ms without data loading, 600 ms without communication",
        "the longer of 300 ms of data loading and 700 ms of the rest explains only 88% of a step: "
        "beside each other they take 100 ms longer",
        "compute takes 500 ms alone and 500 ms in a step",
        "arithmetic at the measured peak would take 40% of the compute time",
        "memory traffic at the measured bandwidth would take 20% of the compute time",
        "a batch twice as large takes 1.90 times as long: 10% of the compute time does not depend on the batch",
        "phases measured apart add up to 100% of a step (tolerance 5%)",
    ]
