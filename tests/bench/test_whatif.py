"""What limits a step whose parts overlap: the part without which a step would take least."""

from dataclasses import replace

import pytest
from made_up import Times, by_rank, by_trial, made_up

from tutti.bench.greedy_search import GreedySearch
from tutti.bench.results import Ceilings, Measurement, Work
from tutti.bench.shares import find_shares
from tutti.bench.verdict import Verdict, judge
from tutti.bench.whatif import StepModel, bucket_count, find_what_if
from tutti.runs.step_parts import SHARES, StepPart

MEBIBYTE = 1 << 20


def ahead(read: float, rest: float, whole: float | None = None, **more: object) -> Measurement:
    """Batches made ahead by a thread, with a step of which compute is the rest."""
    whole = max(read, rest) if whole is None else whole
    phases: dict[str, Times | None] = {"read": read, "compute": rest}
    return made_up("data.prefetch=2", data=max(0.0, whole - rest), computing=rest, phases=phases, **more)  # pyright: ignore[reportArgumentType]


def exchanging(exchange: float, forward: float = 1.0, backward: float = 2.0) -> Measurement:
    """Gradients of several buckets that are averaged during the backward pass; 0.1 of the exchange is never hidden."""
    exposed = max(0.1 * exchange, exchange - backward)
    phases: dict[str, Times | None] = {"exchange": exchange, "communicate": forward + backward + exposed}
    made = made_up(
        ranks=2,
        computing=forward + backward,
        communication=exposed,
        phases=phases,
        gradient_bytes=200 * MEBIBYTE,
    )
    parts = {"forward": ((forward,) * 5,) * 2, "backward": ((backward,) * 5,) * 2}
    return replace(made, parts={**made.parts, **parts})


def on_h200(read: float, compute: float, whole: float, samples: int, **more: object) -> Verdict:
    """One GPU; parts in images a second, and compute beside the loader as it was measured there: 75% of a step."""
    seconds = samples / whole
    exposed = seconds - 0.75 * seconds
    phases: dict[str, Times | None] = {"read": samples / read, "compute": samples / compute}
    return judge(
        made_up(
            data=exposed,
            computing=seconds - exposed,
            phases=phases,
            device="cuda",
            per_rank_batch=samples,
            global_batch=samples,
            **more,  # pyright: ignore[reportArgumentType]
        )
    )


def test_a_loader_slower_than_compute_on_a_gpu_is_named_although_a_step_mostly_computes() -> None:
    verdict = on_h200(4665, 6877, 4955, 256, batches_are_samples=True, settings={"data": {"workers": 15}}, cores=16)
    assert verdict.bound == "data loading"
    assert verdict.sentence == (
        "bound by data loading: the loader makes a batch in 54.9 ms, the rest of a step takes 37.2 ms; "
        "with free reading a step would take 37.2 ms, 1.4 times as fast; faster compute would gain nothing; "
        "try data.workers=32"
    )
    assert verdict.gain == pytest.approx(51.7 / 37.2, abs=0.01)
    assert verdict.shares.share(StepPart.COMPUTE) == pytest.approx(0.75), "the share alone would say compute"
    assert any("106% of it" in line for line in verdict.measurements), "a loader alone that is slower than the step"


def test_reader_threads_at_half_the_speed_of_a_gpu_are_named() -> None:
    verdict = on_h200(539, 1036, 527, 64)
    assert verdict.bound == "data loading"
    assert verdict.gain == pytest.approx(1036 / 527, rel=0.01)


@pytest.mark.parametrize(
    ("ratio", "right"),
    [
        (0.3, {"compute"}),
        (0.7, {"compute"}),
        (0.9, {"compute", "balanced"}),
        (1.0, {"balanced"}),
        (1.1, {"data loading", "balanced"}),
        (1.5, {"data loading"}),
        (2.0, {"data loading"}),
        (20.0, {"data loading"}),
    ],
)
def test_the_longer_of_two_parts_that_overlap_is_named(ratio: float, right: set[str]) -> None:
    assert judge(ahead(ratio, 1.0)).bound in right


def test_what_is_hidden_behind_compute_limits_what_faster_compute_gains() -> None:
    work = Work(flops=0.1, bytes_moved=0.0, least_bytes=0.0, operators=10, synchronisations=0)
    verdict = judge(ahead(0.7, 1.0, work=work, ceilings=(Ceilings(1.0, 1.0),)))
    assert verdict.gain == pytest.approx(1 / 0.7)
    assert "at most 1.4 times as fast, as data loading takes 700 ms" in verdict.sentence
    alone = judge(made_up(data=0.0, computing=1.0, work=work, ceilings=(Ceilings(1.0, 1.0),)))
    assert alone.gain == pytest.approx(10.0)


def test_balanced_parts_that_overlap_are_named_with_their_times() -> None:
    verdict = judge(ahead(1.05, 1.0, batches_are_samples=False))
    assert verdict.sentence.startswith(
        "balanced: data loading (1.05 s) and compute (1 s) take about as long; "
        "they overlap: neither alone gains anything, only both together; try "
    )
    overrides = [each.overrides for each in verdict.suggestions]
    assert ("data.prefetch=4",) in overrides and ("speed.compile=true",) in overrides


@pytest.mark.parametrize(("read", "bound"), [(0.4, "compute"), (1.0, "balanced"), (2.5, "data loading")])
def test_parts_that_share_the_cores_gain_what_they_use(read: float, bound: str) -> None:
    """A loader and compute that alternate on one core take the sum of both, although the loader works ahead."""
    found = ahead(read, 1.0, whole=read + 1.0)
    assert judge(found).bound == bound
    what_if = find_what_if(found, find_shares(found))
    assert what_if.seconds(StepPart.DATA).median == pytest.approx(1.0)
    assert what_if.seconds(StepPart.COMPUTE).median == pytest.approx(read)
    assert any("beside each other they take" in line for line in judge(found).measurements)


def test_loader_processes_that_slow_compute_are_seen_though_no_step_waits() -> None:
    beside = made_up(
        "data.workers=2", computing=2.0, batches_are_samples=True, phases={"read": 1.5, "compute": 0.8, "double": 1.6}
    )
    assert judge(beside).bound == "data loading"
    assert judge(beside).gain == pytest.approx(2.0 / 0.8)


def test_a_step_that_waits_as_long_as_reading_takes_does_not_read_ahead() -> None:
    found = made_up(data=0.6, computing=0.4)
    what_if = find_what_if(found, find_shares(found))
    assert not what_if.reads_ahead and not what_if.overlaps
    assert {part: what_if.gain(part).median for part in SHARES} == pytest.approx(
        {part: figure.median for part, figure in find_shares(found).path.items()}
    )


def test_a_dataset_that_reads_ahead_by_itself_is_recognised_by_what_is_hidden() -> None:
    found = made_up(data=0.5, computing=1.0, phases={"read": 1.5})
    assert find_what_if(found, find_shares(found)).reads_ahead
    assert judge(found).bound == "data loading"


def test_samples_in_the_process_of_the_rank_are_not_made_ahead() -> None:
    found = made_up("data.prefetch=2", data=0.5, computing=0.5, batches_are_samples=True)
    assert not find_what_if(found, find_shares(found)).reads_ahead


def test_one_slow_reader_that_works_ahead_is_a_straggler() -> None:
    found = made_up(
        "data.prefetch=2",
        ranks=2,
        data=by_rank(0.0, 2.0),
        computing=1.0,
        phases={"read": by_rank(0.1, 3.0), "communicate": 1.0},
    )
    verdict = judge(found)
    assert verdict.bound == "straggler"
    assert verdict.gain == pytest.approx(3.0)


def test_batches_that_arrive_in_turn_are_data_loading_and_no_straggler() -> None:
    found = made_up(
        "data.prefetch=2",
        ranks=2,
        data=by_rank(0.1, 0.5),
        computing=1.0,
        phases={"read": 1.5, "communicate": 1.0},
    )
    verdict = judge(found)
    assert verdict.shares.share(StepPart.STRAGGLER) > verdict.shares.share(StepPart.DATA)
    assert verdict.bound == "data loading"
    assert verdict.gain == pytest.approx(1.5)


def test_one_slow_trial_of_reading_alone_changes_nothing() -> None:
    found = ahead(0.5, 1.0)
    seconds = {**found.seconds, "read": ((0.5, 3.0, 0.5, 0.5, 0.5),)}
    assert judge(replace(found, seconds=seconds)).bound == "compute"


def test_reading_alone_that_varies_gives_no_confident_answer() -> None:
    found = ahead(1.0, 1.0, whole=1.6)
    seconds = {**found.seconds, "read": ((0.2, 1.5, 0.2, 1.6, 1.6),), "compute": ((1.5, 0.3, 1.5, 0.3, 0.3),)}
    assert judge(replace(found, seconds=seconds)).bound == "unclear"


@pytest.mark.parametrize(
    ("exchange", "bound"),
    [(0.5, "compute"), (1.4, "compute"), (3.0, "balanced"), (5.0, "communication"), (8.0, "communication")],
)
def test_communication_that_overlaps_with_the_backward_pass(exchange: float, bound: str) -> None:
    """3.0 against 2.0 of backward: without either, a step of 4.0 would take 3.0."""
    assert judge(exchanging(exchange)).bound == bound


def test_without_compute_nothing_hides_communication() -> None:
    found = exchanging(3.0)
    what_if = find_what_if(found, find_shares(found))
    assert what_if.seconds(StepPart.COMPUTE).median == pytest.approx(3.0)
    assert what_if.seconds(StepPart.COMMUNICATION).median == pytest.approx(3.0)
    assert what_if.seconds(StepPart.COMPUTE, 0.5).median == pytest.approx(1.5 + 1.0 + 1.0)


def test_one_bucket_is_never_hidden() -> None:
    found = replace(exchanging(1.5), gradient_bytes=MEBIBYTE // 2)
    assert bucket_count(found) == 1 and bucket_count(exchanging(1.5)) == 9
    assert find_what_if(found, find_shares(found)).models[0].hidden == 0.0


def test_a_model_of_unchanged_parts_is_the_measured_step() -> None:
    for found in (ahead(2.0, 1.0, 2.2), ahead(0.5, 1.0, 1.3), exchanging(3.0), made_up(data=0.2, computing=0.5)):
        shares = find_shares(found)
        models = find_what_if(found, shares).models
        assert [model.seconds() for model in models] == pytest.approx(list(shares.whole.trials))


def test_parts_that_are_twice_as_fast() -> None:
    model = StepModel(True, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.4)
    assert model.seconds({StepPart.DATA: 0.5}) == pytest.approx(1.0 + 0.2)
    assert model.seconds({StepPart.COMPUTE: 0.5}) == pytest.approx(2.0 + 0.2)
    assert model.seconds({StepPart.COMPUTE: 0.0}) == pytest.approx(2.0)


def test_the_answers_are_written() -> None:
    content = judge(ahead(2.0, 1.0)).content()["what_if"]
    assert content["reads_ahead"] is True
    assert content["parts"]["reading"] == {"seconds": 2.0, "step_if_free": 1.0, "step_if_twice_as_fast": 1.0}
    assert content["parts"]["computing"]["step_if_free"] == 2.0


def test_tuning_tries_nothing_for_compute_that_would_gain_nothing() -> None:
    def tried_for(found: Measurement) -> list[str]:
        return [each.text for each in GreedySearch(found)._candidates()]

    assert not [text for text in tried_for(ahead(2.0, 1.0)) if "speed" in text]
    assert [text for text in tried_for(ahead(0.7, 1.0)) if "speed" in text]


def test_trials_in_which_the_longer_part_changes_are_inconclusive() -> None:
    read, rest = by_trial(2.0, 0.5, 2.0, 0.5, 2.0), by_trial(0.5, 2.0, 0.5, 2.0, 0.5)
    waited = by_trial(1.5, 0.0, 1.5, 0.0, 1.5)
    found = made_up("data.prefetch=2", data=waited, computing=rest, phases={"read": read, "compute": rest})
    assert judge(found).bound == "unclear"
