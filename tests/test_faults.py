"""The campaign of faults without its processes: what is drawn, when a ledger is exact, how faults are judged."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))

from fault_campaign import ledger
from fault_campaign.draw import KINDS, LOCAL, NAMESPACES, PLACES, RANKS, SLURM, STEPS, Fault, draw_campaign
from fault_campaign.judge import CAUSE, ENDING, LEDGER, LEFT, Found, judge
from fault_campaign.ledger import Reference, Segment

BATCHES = tuple((4 * step, 4 * step + 1, 4 * step + 2, 4 * step + 3) for step in range(6))
WHOLE = Reference(BATCHES, "weights", {("step loss", 1): 0.5, ("epoch valid_loss", 6): 0.25})
KILLED = Fault(3, 17, "kill rank", LOCAL, "step", 12, 1, "", 1.0)


def test_a_campaign_is_drawn_from_its_seed_alone() -> None:
    assert draw_campaign(1, 80) == draw_campaign(1, 80)
    assert draw_campaign(1, 80)[:40] == draw_campaign(1, 40)
    assert draw_campaign(1, 80) != draw_campaign(2, 80)


def test_every_kind_comes_in_each_of_its_places_before_any_comes_again() -> None:
    possible = [(kind.name, place) for kind in KINDS for place in kind.places]
    drawn = [(fault.kind, fault.place) for fault in draw_campaign(5, len(possible))]
    assert sorted(drawn) == sorted(possible)
    assert {place for _, place in drawn} == set(PLACES)


def test_faults_happen_only_where_and_when_their_kind_allows() -> None:
    by_name = {(kind.name, place): kind for kind in KINDS for place in kind.places}
    for fault in draw_campaign(3, 500):
        kind = by_name[fault.kind, fault.place]
        moments = {moment for each in KINDS if each.name == kind.name for moment in each.moments}
        assert fault.moment in moments and 0 <= fault.rank < RANKS[fault.place]
        assert kind.ranks != "first" or fault.rank == 0
        assert kind.ranks != "others" or fault.rank > 0
        assert 1 <= fault.at < STEPS
        assert fault.way != "slurmd" or fault.place == SLURM


def test_a_campaign_can_be_restricted_to_kinds_and_places() -> None:
    faults = draw_campaign(1, 20, [NAMESPACES], ["cut link", "kill rank"])
    assert {(fault.kind, fault.place) for fault in faults} == {("cut link", NAMESPACES), ("kill rank", NAMESPACES)}
    assert draw_campaign(1, 20, [LOCAL], ["cut link"]) == []


def segment(label: str, first: int, last: int, weights: str | None = None) -> Segment:
    """A start whose dry run has the samples of step `first`, and that has made the steps up to `last`."""
    return Segment(label, first, (BATCHES[first - 1], *BATCHES[first - 1 : last]), weights)


def test_a_ledger_is_exact_where_each_start_begins_at_a_step_that_was_reached() -> None:
    segments = [segment("first", 1, 4, "others"), segment("again", 3, 6, "weights")]
    assert ledger.find_mistakes(segments, WHOLE) == []
    unstarted = Segment("second", 2, ())
    assert ledger.find_mistakes([segments[0], unstarted, segments[1]], WHOLE) == []


@pytest.mark.parametrize(
    ("segments", "mistake"),
    [
        ([segment("first", 1, 2), segment("again", 4, 6)], "start again: steps 3 to 3 were left out"),
        ([segment("first", 1, 5)], "1 steps are missing at the end"),
        ([segment("first", 1, 6, "others")], "the last weights are not those of the undisturbed run"),
        ([Segment("first", 1, (BATCHES[0], BATCHES[0], BATCHES[2]))], "start first: other samples at step 2"),
        ([Segment("first", 1, ((9, 9), *BATCHES))], "start first: its first samples are those of no step"),
    ],
)
def test_samples_that_are_lost_doubled_or_others_are_found(segments: list[Segment], mistake: str) -> None:
    assert mistake in ledger.find_mistakes(segments, WHOLE)


def test_steps_count_when_all_ranks_have_made_them() -> None:
    def lines(rank: int, passes: int) -> list[dict[str, Any]]:
        train = [{"event": "train", "ids": [10 * number + rank]} for number in range(passes)]
        return [{"event": "start", "rank": rank, "start": "first", "time": 5 + rank}, *train]

    made = ledger.make_segment("first", {1: lines(1, 3), 0: lines(0, 4)}, 2)
    assert (made.began, made.batches, made.steps) == (5, ((0, 1), (10, 11), (20, 21)), 2)


def test_an_undisturbed_run_with_a_doubled_sample_is_refused() -> None:
    ledger.check_reference(dataclasses.replace(WHOLE, batches=((0, 1), (2, 3), (3, 1), (2, 0))), 4, 2)
    with pytest.raises(ValueError, match="epoch 2"):
        ledger.check_reference(dataclasses.replace(WHOLE, batches=((0, 1), (2, 3), (3, 1), (2, 1))), 4, 2)


def test_losses_may_only_be_missing_where_lines_were_lost() -> None:
    some = {("step loss", 1): 0.5}
    assert ledger.compare_losses(some, WHOLE.losses) == ["epoch valid_loss at step 6 is missing"]
    assert ledger.compare_losses(some, WHOLE.losses, may_miss=True) == []
    assert ledger.compare_losses({("step loss", 1): 0.6}, WHOLE.losses, may_miss=True) == ["step loss at step 1 is 0.6"]


def test_lines_that_were_cut_short_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": 0.5}\n{"event": "st')
    assert ledger.read_losses(tmp_path / "metrics.jsonl") == {("step loss", 1): 0.5}


def resumed(**more: Any) -> dict[str, Any]:
    return {"hung": False, "codes": [0], "screen": "", "state": "finished", "latest": STEPS, "trained": True} | more


def killed(**more: Any) -> Found:
    """What is promised when a rank is killed."""
    record = {"state": "failed", "cause": "rank_lost", "failed_rank": 1}
    screen = "error: rank 1 on host h1 failed: ended by signal SIGKILL"
    return dataclasses.replace(Found(codes=[1], screen=screen, record=record, latest=7, resumes=[resumed()]), **more)


def test_a_promise_that_is_kept_has_no_problems() -> None:
    assert judge(KILLED, killed()).is_good


@pytest.mark.parametrize(
    ("found", "question", "words"),
    [
        (killed(hung=True), ENDING, "hangs"),
        (killed(codes=[0]), ENDING, "exit codes [0], expected 1 or 76"),
        (killed(screen="error: rank 1\nTraceback (most recent call last):\n  x\nOSError: 1"), ENDING, "OSError: 1"),
        (killed(record={"state": "finished"}), ENDING, "the record says finished, the newest checkpoint is of step 7"),
        (killed(record={"state": "running"}), ENDING, "the record still says running"),
        (killed(resumes=[resumed(codes=[2])]), ENDING, "resume 1 ended with exit codes [2]"),
        (killed(resumes=[resumed(latest=35)]), ENDING, "a checkpoint of step 35"),
        (killed(screen="error: rank 0 failed"), CAUSE, "not on the screen"),
        (killed(record={"state": "failed", "cause": "error"}), CAUSE, "the record's cause is error"),
        (killed(record={"state": "failed", "cause": "rank_lost", "failed_rank": 0}), CAUSE, "names rank 0"),
        (killed(ledger=["a step is missing"]), LEDGER, "a step is missing"),
        (killed(left=["python"]), LEFT, "python"),
    ],
)
def test_a_promise_that_is_broken_is_named_under_its_question(found: Found, question: str, words: str) -> None:
    verdict = judge(KILLED, found)
    assert any(words in problem for problem in verdict.problems[question]), verdict
    assert not verdict.is_good and not verdict.answer(question)


def test_of_two_resumes_exactly_one_may_train() -> None:
    fault = dataclasses.replace(KILLED, kind="two resumes")
    refused = resumed(codes=[2], trained=False)
    found = Found(codes=[-9], record={"state": "running"}, latest=7, resumes=[resumed(), refused])
    assert judge(fault, found).is_good
    both = dataclasses.replace(found, resumes=[resumed(), resumed()])
    assert "2 of two resumes at once have trained" in judge(fault, both).problems[ENDING][0]
    assert not judge(fault, both).answer(LEDGER)


def test_a_damaged_checkpoint_must_be_refused_with_the_name_of_the_last_good_one() -> None:
    fault = dataclasses.replace(KILLED, kind="flipped shard")
    text = "error: checkpoint step-000021 is damaged: ... The last good one before it is step-000014"
    refused = resumed(codes=[2], screen=text, state="running", latest=21)
    found = Found(codes=[-9], record={"state": "running"}, latest=21, resumes=[refused, resumed()])
    assert judge(fault, found).is_good
    loaded = dataclasses.replace(found, resumes=[resumed()])
    assert "a damaged checkpoint led to [0]" in judge(fault, loaded).problems[ENDING][0]


def test_a_run_whose_disk_was_full_may_only_be_finished_with_its_last_checkpoint() -> None:
    fault = dataclasses.replace(KILLED, kind="full disk", rank=0, way="for good")
    good = Found(codes=[1], screen="error: No space left on device", record={"state": "failed"}, latest=7)
    assert judge(fault, dataclasses.replace(good, resumes=[resumed()])).is_good
    silent = dataclasses.replace(good, codes=[0], screen="", record={"state": "finished"})
    assert not judge(fault, silent).answer(ENDING) and not judge(fault, silent).answer(CAUSE)
