"""When a run is requeued: the policy, and the bookkeeping around it."""

import re
import threading
import time
from pathlib import Path

import pytest
from waiting import wait_until

from tutti.errors import LaunchError
from tutti.launch.cluster import requeue
from tutti.launch.cluster.requeue import Decision, begin, decide, ended_early, finish, notes_folder, requeue_run
from tutti.ranks.failures import Failure, leave_note
from tutti.runs.folder import RunFolder
from tutti.runs.jobs import Attempt, JobRecord, changed_job, read_job


def attempts(*ends: tuple[int, int]) -> list[Attempt]:
    """Starts that ended with a code and a step each, one after the other."""
    made, step = [], 0
    for code, last_step in ends:
        made.append(Attempt("7", "then", first_step=step, last_step=last_step, ended="then", code=code))
        step = last_step
    return made


@pytest.mark.parametrize(
    ("ends", "outcome", "reason"),
    [
        ([(0, 10)], "complete", "the run is complete"),
        ([(75, 10)], "again", "stopped by a signal or at the end of its time"),
        ([(75, 0)], "again", "stopped by a signal"),
        ([(75, 0), (75, 0)], "failed", "time limit is too short to make a checkpoint. Submit with a longer --time"),
        ([(75, 10), (75, 10), (75, 10)], "failed", "two starts in a row have ended before the run passed step 10"),
        ([(75, 0), (75, 10), (75, 10)], "again", "stopped by a signal"),
        ([(76, 10)], "again", "it lost ranks or hosts"),
        ([(76, 10), (76, 10)], "failed", "it lost ranks or hosts, and there is no progress since the last start"),
        ([(137, 10)], "again", r"ended by a signal \(exit code 137\)"),
        ([(143, 0)], "failed", "no progress since the last start"),
        ([(-9, 0)], "failed", "no progress since the last start"),
        ([(1, 10)], "failed", r"the run failed \(exit code 1\), and another start would fail, too"),
        ([(255, 10)], "failed", r"the run failed \(exit code 255\)"),
        ([(2, 0)], "failed", r"the run failed \(exit code 2\)"),
        ([(75, 1), (75, 2), (75, 3)], "again", "stopped"),
        ([(75, 1), (75, 2), (75, 3), (75, 4)], "failed", "already requeued 3 times, of at most 3"),
        ([(75, 1), (75, 2), (75, 3), (0, 4)], "complete", "complete"),
    ],
)
def test_what_follows_from_how_a_run_ended(ends: list[tuple[int, int]], outcome: str, reason: str) -> None:
    decision = decide(attempts(*ends), max_requeues=3)
    assert decision.outcome == outcome
    assert re.search(reason, decision.reason), decision.reason


def test_a_cancelled_run_is_not_started_again() -> None:
    assert decide(attempts((75, 10)), 3, "it was cancelled") == Decision("stopped", "it was cancelled")
    assert decide(attempts((0, 10)), 3, "it was cancelled").outcome == "complete"


def test_a_job_that_is_told_to_end_before_its_time_was_cancelled() -> None:
    assert ended_early({"TUTTI_JOB_ENDS": "1000"}, 900)
    assert not ended_early({"TUTTI_JOB_ENDS": "1000"}, 995)
    assert ended_early({}, 995)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A submitted run of at most two starts after its first."""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.checkpoints.mkdir()
    JobRecord("slurm", "slurm", "digits", {}, max_requeues=2, script="job.sh", ids=["7"]).write(folder)
    return folder


def note(folder: RunFolder, rank: int, exit_code: int, text: str, consequence: bool = False, late: float = 0) -> None:
    leave_note(notes_folder(folder), Failure(rank, "n1", time.time() + late, exit_code, text, True, consequence))


def save(folder: RunFolder, step: int) -> None:
    (folder.checkpoints / "latest").write_text(f"step-{step:06d}\n")


def test_every_start_is_kept_with_its_steps(run: RunFolder) -> None:
    assert begin(run, "7") is None
    save(run, 10)
    assert finish(run, 75, told_early=False).decision.outcome == "again"
    assert begin(run, "7") is None
    assert finish(run, 0, told_early=False).decision.outcome == "complete"
    found = [(a.first_step, a.last_step, a.code, a.outcome) for a in read_job(run).attempts]
    assert found == [(0, 10, 75, "again"), (10, 10, 0, "complete")]


def test_a_scheduler_that_starts_a_run_by_itself_is_counted_too(run: RunFolder) -> None:
    for _ in range(3):
        assert begin(run, "7") is None
    assert begin(run, "7") == "it was already requeued 2 times, the most that is allowed"


def test_a_script_that_a_person_submits_counts_from_the_beginning(run: RunFolder) -> None:
    for _ in range(3):
        begin(run, "7")
    assert begin(run, "8") is None
    assert read_job(run).ids == ["7", "8"]
    assert len(read_job(run).attempts) == 1


def test_a_job_that_starts_before_its_id_is_noted_is_ours(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(run, "7")
    job = read_job(run)
    job.submitting = True
    job.write(run)
    monkeypatch.setattr(requeue, "_SUBMITTING_SECONDS", 0)  # whoever submits it has been killed
    assert begin(run, "8") is None
    job = read_job(run)
    assert ([attempt.id for attempt in job.attempts], job.submitting) == (["7", "8"], False)


def test_the_first_cause_decides_and_not_the_launchers_code(run: RunFolder) -> None:
    begin(run, "7")
    save(run, 10)
    note(run, 0, 76, "rank 3 is gone", late=-5)  # its clock is behind
    note(run, 1, 1, "connection closed", consequence=True, late=-4)
    note(run, 3, 1, "the loss is not a number")
    ending = finish(run, 143, told_early=False)
    assert (ending.decision.outcome, ending.code) == ("failed", 1)
    assert ending.cause is not None
    assert ending.cause.text == "the loss is not a number"


def test_ranks_that_only_lost_another_are_started_again(run: RunFolder) -> None:
    begin(run, "7")
    save(run, 10)
    note(run, 1, 1, "connection closed", consequence=True)
    decision = finish(run, 137, told_early=False).decision
    assert decision == Decision("again", "it lost ranks or hosts; start 2 of at most 3")
    begin(run, "7")
    assert not list(notes_folder(run).iterdir())  # of the start before
    assert finish(run, 0, told_early=False).decision.outcome == "complete"


def test_a_job_that_is_told_to_end_early_is_left_to_who_told_it(run: RunFolder) -> None:
    begin(run, "7")
    save(run, 10)
    decision = finish(run, 75, told_early=True).decision
    assert decision == Decision("stopped", "its job was cancelled before the end of its time")


@pytest.mark.system
def test_a_scheduler_that_does_not_start_it_again_is_quoted(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    begin(run, "7")
    finish(run, 75, told_early=False)
    with pytest.raises(LaunchError, match=r"could not be requeued: scontrol cannot be called: .* Submit .*job.sh by"):
        requeue_run(run)
    assert read_job(run).attempts[-1].outcome == "failed"


def test_a_cancellation_that_comes_while_an_end_is_recorded_is_not_lost(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, "7")
    save(run, 10)

    def cancelled_meanwhile(folder: RunFolder) -> int:  # called between reading and writing
        thread = threading.Thread(target=cancel)
        thread.start()
        thread.join(0.5)  # it waits, or is done; after a second both have ended
        return 10

    def cancel() -> None:
        with changed_job(run) as job:
            job.cancelled = "just now"

    monkeypatch.setattr(requeue, "newest_step", cancelled_meanwhile)
    assert finish(run, 75, told_early=False).decision.outcome == "again"
    wait_until(lambda: read_job(run).cancelled, lambda: "the cancellation was lost")
    job = read_job(run)
    assert (job.cancelled, job.attempts[-1].code) == ("just now", 75)
    assert not requeue_run(run), "it is not requeued any more"
    assert read_job(run).attempts[-1].reason == "it was cancelled"
    assert begin(run, "7") == "it was cancelled"
