"""Studies that are run, stopped, killed and resumed; their runs are small programs that write run folders."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import study_work
from conftest import environment
from prepared import PYTHON
from study_work import Noted, Pretended
from waiting import wait_until

from tutti.errors import FolderError, Interrupted
from tutti.runs.folder import RunFolder
from tutti.study import running
from tutti.study.definition import Definition, Goal, PointState, StudyFolder, read_definition, read_state
from tutti.study.executors import failure_reason
from tutti.study.folder import find_study, lock_study, make_study
from tutti.study.outcome import read_outcomes
from tutti.study.running import decide, run_study
from tutti.study.scale import scale_points

TIMED, FULL = Goal("steps", 100, 10), Goal("full")
WORK = str(Path(study_work.__file__))


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Path]:
    """What the runs of a study do, by point."""

    def write(**wishes: list[str]) -> Path:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({name.replace("_", "-"): each for name, each in wishes.items()}))
        return path

    return write


def make(tmp_path: Path, goal: Goal = TIMED, out: str = "runs") -> StudyFolder:
    checked = scale_points("digits", [], [1, 2, 4], "weak", goal, 1)
    points = tuple(each.point for each in checked)
    definition = Definition("scale", "digits", (), goal, points, mode="weak")
    return make_study(str(tmp_path / out), "digits", definition, checked)


def run(folder: StudyFolder, plan: Path, retry: bool = False, at_once: int = 1) -> list[tuple[str, str]]:
    noted = Noted()
    run_study(folder, read_definition(folder), Pretended(plan), noted, retry, at_once)
    return noted.ends


def states(folder: StudyFolder) -> dict[str, str]:
    return {point.id: read_state(folder, point.id).state for point in read_definition(folder).points}


def starts(plan: Path, point: str) -> list[str]:
    path = plan.with_name(f"starts-{point}")
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("state", "goal", "run_state", "has_checkpoint", "retry", "expected"),
    [
        ("waiting", TIMED, None, False, False, "start"),
        ("waiting", FULL, None, False, False, "start"),
        ("finished", TIMED, "finished", False, True, "nothing"),
        ("failed", TIMED, "failed", False, False, "nothing"),
        ("failed", TIMED, "failed", False, True, "start"),
        ("failed", FULL, "failed", True, True, "resume"),
        ("running", TIMED, "interrupted", True, False, "start"),
        ("running", FULL, "interrupted", True, False, "resume"),
        ("running", FULL, "interrupted", False, False, "start"),
        ("running", FULL, "finished", True, False, "record"),
        ("waiting", FULL, "stopped", True, False, "resume"),
    ],
)
def test_what_is_left_of_a_point(state, goal, run_state, has_checkpoint, retry, expected) -> None:
    assert decide(PointState(state), goal, run_state, has_checkpoint, retry) == expected


@pytest.mark.system
def test_points_run_in_their_order_each_on_its_ranks(tmp_path: Path, plan: Callable[..., Path]) -> None:
    folder, wishes = make(tmp_path), plan()
    assert run(folder, wishes) == [("n1-r1", "finished"), ("n2-r1", "finished"), ("n4-r1", "finished")]
    assert [starts(wishes, f"n{ranks}-r1")[0].split()[0] for ranks in (1, 2, 4)] == ["1", "2", "4"]
    outcomes = read_outcomes(folder, read_definition(folder))
    assert [each.windows[0].samples_per_second for each in outcomes] == [100.0, 200.0, 400.0]
    assert run(folder, wishes) == []


@pytest.mark.system
def test_a_point_that_fails_is_told_and_the_rest_stands(tmp_path: Path, plan: Callable[..., Path]) -> None:
    folder, wishes = make(tmp_path), plan(n1_r1=["fail", "finish"], n2_r1=["die"])
    run(folder, wishes)
    assert states(folder) == {"n1-r1": "failed", "n2-r1": "failed", "n4-r1": "finished"}
    assert read_state(folder, "n1-r1").reason == "the disk is full."
    assert read_state(folder, "n2-r1").reason == "ended with exit code 3 without any output"
    assert run(folder, wishes) == []
    assert run(folder, wishes, retry=True) == [("n1-r1", "finished"), ("n2-r1", "failed")]
    assert (read_state(folder, "n1-r1").attempts, read_state(folder, "n1-r1").reason) == (2, None)


@pytest.mark.system
def test_a_run_that_is_stopped_stops_the_study(tmp_path: Path, plan: Callable[..., Path]) -> None:
    folder, wishes = make(tmp_path, FULL), plan(n2_r1=["stop", "finish"])
    with pytest.raises(Interrupted, match=r"with 2 of 3 points left. Resume with: tutti scale --resume .*_scale_weak"):
        run(folder, wishes)
    assert states(folder) == {"n1-r1": "finished", "n2-r1": "waiting", "n4-r1": "waiting"}
    assert [name for name, _ in run(folder, wishes)] == ["n2-r1", "n4-r1"]


@pytest.mark.system
def test_points_may_run_beside_each_other(tmp_path: Path, plan: Callable[..., Path]) -> None:
    folder, wishes = make(tmp_path), plan(n1_r1=["meet finish"], n2_r1=["meet finish"], n4_r1=["fail"])
    assert sorted(run(folder, wishes, at_once=3)) == [("n1-r1", "finished"), ("n2-r1", "finished"), ("n4-r1", "failed")]


@pytest.mark.system
def test_a_run_that_is_stopped_ends_those_beside_it_which_go_on_later(
    tmp_path: Path, plan: Callable[..., Path]
) -> None:
    folder, wishes = (
        make(tmp_path, FULL),
        plan(n1_r1=["wait", "finish"], n2_r1=["meet stop", "finish"], n4_r1=["wait", "finish"]),
    )
    with pytest.raises(Interrupted, match=r"stopped with the run of n2-r1, with 3 of 3 points left"):
        run(folder, wishes, at_once=3)
    assert states(folder) == {"n1-r1": "waiting", "n2-r1": "waiting", "n4-r1": "waiting"}
    assert len(run(folder, wishes, at_once=2)) == 3


def start_and_wait(folder: StudyFolder, wishes: Path, point: str) -> subprocess.Popen[bytes]:
    """The study as a process of its own, in the middle of a point."""
    words = [PYTHON, WORK, str(folder.path), str(wishes)]
    process = subprocess.Popen(
        words, env=environment(), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until((folder.run(point).checkpoints / "latest").exists, lambda: f"{point} saves nothing", process)
    return process


@pytest.mark.system
@pytest.mark.parametrize("goal", [TIMED, FULL], ids=["timed", "full"])
def test_a_study_killed_in_the_middle_goes_on_with_what_is_missing(
    goal: Goal, tmp_path: Path, plan: Callable[..., Path]
) -> None:
    folder, wishes = make(tmp_path, goal), plan(n2_r1=["wait", "finish"])
    process = start_and_wait(folder, wishes, "n2-r1")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert states(folder) == {"n1-r1": "finished", "n2-r1": "running", "n4-r1": "waiting"}
    assert run(folder, wishes) == [("n2-r1", "finished"), ("n4-r1", "finished")]
    found = [len(starts(wishes, point)) for point in ("n1-r1", "n2-r1", "n4-r1")]
    assert found == [1, 2, 1]
    is_clean = "metrics.jsonl" not in starts(wishes, "n2-r1")[1]
    assert is_clean == (goal is TIMED)
    other = make(tmp_path, goal, out="whole")
    run(other, plan())
    assert _figures(folder) == _figures(other)


def _figures(folder: StudyFolder) -> list[object]:
    outcomes = read_outcomes(folder, read_definition(folder))
    return [(each.point, each.windows, each.state.state, each.plan) for each in outcomes]


@pytest.mark.system
def test_a_study_that_is_told_to_end_ends_its_point_and_lets_it_go_on(
    tmp_path: Path, plan: Callable[..., Path]
) -> None:
    folder, wishes = make(tmp_path, FULL), plan(n1_r1=["wait", "finish"])
    process = start_and_wait(folder, wishes, "n1-r1")
    process.send_signal(signal.SIGINT)
    told = process.communicate()[1].decode()
    assert "stopped by a signal, with 3 of 3 points left" in told
    assert read_state(folder, "n1-r1") == PointState(
        "waiting", attempts=1, started=read_state(folder, "n1-r1").started, launch_line=_line(folder, wishes)
    )


def _line(folder: StudyFolder, wishes: Path) -> str:
    return " ".join(Pretended(wishes).command(folder.run("n1-r1").path, 1))


def test_one_process_at_a_time_runs_a_study(tmp_path: Path) -> None:
    folder = make(tmp_path)
    with lock_study(folder), pytest.raises(FolderError, match="is run by another process"), lock_study(folder):
        pass
    with lock_study(folder):
        pass


def test_every_point_has_its_configuration_before_the_first_one_runs(tmp_path: Path) -> None:
    folder = make(tmp_path)
    assert sorted(path.parent.name for path in folder.points.glob("*/config.yaml")) == ["n1-r1", "n2-r1", "n4-r1"]
    assert "per_rank: 64" in folder.run("n4-r1").config.read_text()


def test_the_newest_study_of_a_kind_is_found(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    assert first.path != second.path
    assert find_study("latest", "scale", str(tmp_path / "runs")) == second
    with pytest.raises(FolderError, match="there is no study of tutti sweep in"):
        find_study("latest", "sweep", str(tmp_path / "runs"))


NOW, BEFORE, LATER = "2026-11-16T10:00:00+00:00", "2026-11-16T09:59:59+00:00", "2026-11-16T11:00:05+01:00"


@pytest.mark.parametrize(
    ("fields", "output", "code", "reason"),
    [
        ({"failure": "the disk is full.", "ended": LATER}, "error: another text\n", 2, "the disk is full."),
        (
            {"failure": "ValueError: x", "failed_rank": 1, "failed_host": "a", "ended": NOW},
            "error: another text\n",
            1,
            "rank 1 on host a failed: ValueError: x",
        ),
        ({"failure": "of an earlier start", "ended": BEFORE}, "", 5, "ended with exit code 5 without any output"),
        ({}, "Killed by the kernel\n\n", -9, "ended by signal SIGKILL; its last line: Killed by the kernel"),
    ],
)
def test_the_reason_of_a_failure_is_a_line(
    fields: dict[str, Any], output: str, code: int, reason: str, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path)
    run.record.write_text(json.dumps({"state": "failed", "segments": [{}]} | fields))
    (tmp_path / "log").write_text(output)
    assert failure_reason(run, NOW, code, tmp_path / "log") == reason


@pytest.mark.system
def test_a_point_that_writes_nothing_any_more_is_ended(
    tmp_path: Path, plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(running, "_LOOK_SECONDS", 0.1)
    folder, wishes = make(tmp_path, FULL), plan(n1_r1=["wait"], n2_r1=["wait"], n4_r1=["wait"])
    assert run(folder, wishes) == [("n1-r1", "failed"), ("n2-r1", "failed"), ("n4-r1", "failed")]
    assert read_state(folder, "n1-r1").reason == "ended, since it had written nothing for 0.5 s"
