"""Verdicts on recipes with a known fault: a few with large margins, and the whole set with its score."""

import namespaces
import pytest
from bench import overlaps
from bench.fault_ranks import Found, find_verdicts, score
from bench.faults import CASES, HEALTHY, Case, data, layers, only, recipe

pytestmark = pytest.mark.ranks
LEAST_SCORE = 0.95
LARGE_SECONDS = 0.1  # against 1 ms of compute: a busy machine delays a step by less than that in most trials
LARGE = [
    Case(
        "reading",
        "slow reads",
        "batches wait 100 ms on both ranks",
        only("data loading"),
        recipe(data("Sleeping", seconds=LARGE_SECONDS), layers(128), 16),
        ranks=2,
        seconds=1.0,
    ),
    Case(
        "straggler",
        "straggler",
        "batches of rank 1 wait 100 ms",
        only("straggler"),
        recipe(data("Sleeping", seconds=LARGE_SECONDS, on_rank=1), layers(128), 16),
        ranks=2,
        seconds=1.0,
    ),
    Case(
        "host",
        "host",
        "the loss waits 100 ms on both ranks",
        only("host"),
        recipe(data(), layers(128), 16, loss={"name": "bench.fault_parts:waits", "seconds": LARGE_SECONDS}),
        ranks=2,
        seconds=1.0,
    ),
]
MEASUREMENTS = 5  # of a case whose trials differ too much, as they may on a busy machine


def words(found: Found) -> str:
    return "\n".join([f"{found.case.name}: {found.bound}", found.sentence, *found.measurements])


def test_large_faults_are_found_on_two_ranks() -> None:
    """What is said is right at once; where trials differ, nothing is said, and the case is measured again."""
    open_cases = LARGE
    for _ in range(MEASUREMENTS):
        found = find_verdicts(open_cases)
        said = [each for each in found if each.bound != "unclear"]
        for each in said:
            assert each.is_right, words(each)
            assert each.shares, "a verdict has its shares"
        open_cases = [each.case for each in found if each.bound == "unclear"]
        if not open_cases:
            return
    raise AssertionError("no conclusion in any measurement\n" + "\n\n".join(map(words, found)))


def test_the_set_has_every_kind_of_fault_in_several_sizes() -> None:
    assert len(CASES) >= 24 and len({case.name for case in CASES}) == len(CASES)
    kinds = [case.kind for case in CASES]
    for kind in (
        "slow reads",
        "too few loader workers",
        "straggler",
        "slow network",
        ".item() in the step",
        "tiny per-rank batch",
        "oversized model",
        "healthy",
        "balanced",
    ):
        assert kinds.count(kind) >= 2, kind


def test_the_set_has_parts_that_overlap_by_threads_processes_and_links() -> None:
    names = [case.name for case in overlaps.CASES]
    assert len(set(names)) == len(names)
    for who in ("a thread", "processes"):
        for ranks in ("1 rank", "2 ranks"):
            ratios = [f"read ahead by {who} x{ratio}, {ranks}" for ratio in ("0.7", "0.9", "1.1", "1.5", "2")]
            assert set(ratios) <= set(names)
    exchanged = [case for case in overlaps.CASES if case.kind == "overlapping communication"]
    assert {bound for case in exchanged for bound in case.right} == {"compute", "communication"}
    assert all(case.kind.startswith(overlaps.OVERLAPPING) for case in overlaps.CASES)


def test_a_healthy_run_may_only_be_called_so() -> None:
    case = next(case for case in CASES if case.right == HEALTHY)
    said = {bound: Found(case, bound, "", {}, (), ()) for bound in ("compute", "unclear", "memory", "data loading")}
    assert [bound for bound, found in said.items() if found.is_right] == ["compute", "unclear"]
    assert score([said["compute"], said["memory"]]) == (0.5, [said["memory"]])


def test_a_fault_that_is_not_seen_is_no_confident_error_on_a_healthy_run() -> None:
    case = next(case for case in CASES if case.kind == "slow reads")
    missed = Found(case, "compute", "", {}, (), ())
    assert score([missed]) == (0.0, [])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_set_is_judged_right() -> None:
    cases = [case for case in [*CASES, *overlaps.CASES] if case.rate is None or not namespaces.unavailable()]
    found = find_verdicts(cases)
    wrong = "\n\n".join(words(each) for each in found if not each.is_right)
    share, confident = score(found)
    assert not confident, "\n\n".join(words(each) for each in confident)
    assert share >= LEAST_SCORE, wrong
