"""Properties of the decision whether a run is requeued, for any history of its starts."""

import copy
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.launch.cluster.requeue import LOST, STOPPED, Decision, decide
from tutti.runs.jobs import Attempt

MAY_START_AGAIN = st.sampled_from([*[STOPPED] * 6, LOST, LOST, 129, 137, 143, 192, -1, -9, -64])  # and by signals
PROGRESS = st.sampled_from([0, 0, 1, 3])  # steps
CODES = MAY_START_AGAIN | st.just(0) | st.integers(1, 255)
REASONS = st.none() | st.just("") | st.text(min_size=1, max_size=10)
LIMITS = st.integers(0, 12)

repeatable = settings(max_examples=100, deadline=None, derandomize=True)


def attempt(code: int | None, first_step: int, last_step: int | None) -> Attempt:
    return Attempt("7", "then", first_step=first_step, last_step=last_step, ended="then", code=code)


@st.composite
def histories(draw: st.DrawFn, last: st.SearchStrategy[int] = CODES) -> list[Attempt]:
    """Starts one after the other, each from the newest step before it; one that a node took with it has no code."""
    made, step = [], 0
    for _ in range(draw(st.integers(0, 3) | st.integers(0, 12))):
        code, steps = draw(st.none() | MAY_START_AGAIN), draw(PROGRESS)
        made.append(attempt(code, step, None if code is None else step + steps))
        step += steps
    made.append(attempt(draw(last), step, step + draw(PROGRESS)))
    return made


def may_start_again(code: int | None) -> bool:
    return code is not None and (code in (STOPPED, LOST) or code < 0 or 129 <= code <= 192)


@repeatable
@given(histories(), LIMITS, REASONS)
def test_a_decision_is_well_formed_and_the_same_each_time(
    attempts: list[Attempt], max_requeues: int, ended_by: str | None
) -> None:
    before = copy.deepcopy(attempts)
    decision = decide(attempts, max_requeues, ended_by)
    assert decision.outcome in ("complete", "again", "stopped", "failed")
    assert decision.reason and "\n" not in decision.reason.removeprefix(ended_by or "")
    assert attempts == before
    assert decide(copy.deepcopy(attempts), max_requeues, ended_by) == decision


@repeatable
@given(histories(st.just(0)), LIMITS, REASONS)
def test_a_run_that_is_complete_is_complete_whatever_came_before(
    attempts: list[Attempt], max_requeues: int, ended_by: str | None
) -> None:
    assert decide(attempts, max_requeues, ended_by) == Decision("complete", "the run is complete")


@repeatable
@given(histories(CODES.filter(bool)), LIMITS, st.text(min_size=1))
def test_a_run_that_somebody_has_ended_is_left_as_it_is(
    attempts: list[Attempt], max_requeues: int, ended_by: str
) -> None:
    assert decide(attempts, max_requeues, ended_by) == Decision("stopped", ended_by)


@repeatable
@given(histories(st.integers(1, 255)), LIMITS)
def test_a_failure_of_its_own_is_not_repeated(attempts: list[Attempt], max_requeues: int) -> None:
    decision = decide(attempts, max_requeues)
    assert decision.outcome in ("again", "failed")
    if not may_start_again(attempts[-1].code):
        assert decision.outcome == "failed"
        assert f"exit code {attempts[-1].code}" in decision.reason


@repeatable
@given(histories(MAY_START_AGAIN), LIMITS)
def test_a_run_is_started_at_most_as_often_as_allowed(attempts: list[Attempt], max_requeues: int) -> None:
    decision = decide(attempts, max_requeues)
    if decision.outcome == "again":
        assert len(attempts) <= max_requeues
        assert f"start {len(attempts) + 1} of at most {max_requeues + 1}" in decision.reason
    elif attempts[-1].made_progress:
        assert decision.outcome == "failed" and len(attempts) > max_requeues
        assert f"of at most {max_requeues}" in decision.reason


@repeatable
@given(histories(MAY_START_AGAIN), LIMITS)
def test_a_start_without_progress_is_followed_by_another_only_after_one_stop_in_time(
    attempts: list[Attempt], max_requeues: int
) -> None:
    *before, last = attempts
    decision = decide(attempts, max_requeues)
    if decision.outcome == "again" and not last.made_progress:
        assert last.code == STOPPED
        assert not before or before[-1].code != STOPPED or before[-1].made_progress
    if not last.made_progress and last.code != STOPPED:
        assert decision.outcome == "failed" and "no progress since the last start" in decision.reason


@repeatable
@given(histories(MAY_START_AGAIN), LIMITS, LIMITS)
def test_a_higher_limit_never_stops_a_run(attempts: list[Attempt], limit: int, more: int) -> None:
    if decide(attempts, limit).outcome == "again":
        assert decide(attempts, limit + more).outcome == "again"


@repeatable
@given(histories(MAY_START_AGAIN), LIMITS, st.integers(1, 100))
def test_more_progress_never_stops_a_run(attempts: list[Attempt], limit: int, more: int) -> None:
    further = [
        *attempts[:-1],
        attempt(attempts[-1].code, attempts[-1].first_step, (attempts[-1].last_step or 0) + more),
    ]
    if decide(attempts, limit).outcome == "again":
        assert decide(further, limit).outcome == "again"


@repeatable
@given(st.lists(st.tuples(MAY_START_AGAIN, PROGRESS), min_size=14, max_size=14), LIMITS)
def test_a_run_that_is_started_as_decided_ends_within_its_limit(ends: list[tuple[int, int]], limit: int) -> None:
    attempts, step = [], 0
    for code, steps in ends:
        attempts.append(attempt(code, step, step + steps))
        step += steps
        if decide(attempts, limit).outcome != "again":
            break
    assert len(attempts) <= limit + 1
    stuck = [not each.made_progress for each in attempts[:-1]]
    assert not any(first and second for first, second in itertools.pairwise(stuck))
