"""Studies as jobs: submitted with dependencies, and the states of points from those of their jobs.

The scheduler here is a small script that notes what it is asked; a real Slurm is in tests/cluster.
"""

import json
from pathlib import Path

import pytest

from tutti.cli.studies import Planned, StudyOptions, start_study
from tutti.errors import ConfigError, LaunchError
from tutti.launch.cluster.resources import Wishes
from tutti.launch.cluster.schedulers import JobState, scheduler_of
from tutti.launch.cluster.status import Status
from tutti.runs.folder import RunFolder
from tutti.runs.jobs import Attempt, JobRecord, read_job
from tutti.study.definition import Definition, Goal, PointState, StudyFolder, read_state, write_state
from tutti.study.folder import make_study
from tutti.study.scale import scale_points
from tutti.study.submitted import prepare_jobs, state_of_job, submit_missing, write_jobs

SBATCH = """#!/bin/bash
echo "$@" >>"$CLUSTER/asked"
echo $((40 + $(wc -l <"$CLUSTER/asked")))
"""
WISHES = Wishes(ranks_per_node=2, time="30")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login node whose sbatch numbers jobs from 41."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sbatch", "qsub"):
        (programs / name).write_text(SBATCH)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("CLUSTER", str(tmp_path))
    return tmp_path


def make(tmp_path: Path) -> tuple[StudyFolder, Definition]:
    checked = scale_points("digits", [], [1, 2, 4], "weak", Goal("steps", 10, 1), 1)
    jobs = prepare_jobs("digits", checked, "slurm", WISHES)
    points = tuple(each.point for each in checked)
    definition = Definition("scale", "digits", (), Goal("steps", 10, 1), points, mode="weak", on="slurm")
    folder = make_study(str(tmp_path / "runs"), "digits", definition, checked)
    write_jobs(folder, definition, jobs)
    return folder, definition


def test_a_dry_run_prints_every_script_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without a scheduler, as to look at the scripts before an account is there."""
    monkeypatch.chdir(tmp_path)
    checked = scale_points("digits", [], [4, 8], "weak", Goal("steps", 10, 1), 1)
    options = StudyOptions(
        "digits", on="theta", ranks_per_node=4, account="me", directives=["-O scaling"], dry_run=True
    )
    start_study(Planned("scale", "digits", (), Goal("steps", 10, 1), checked, "weak"), options)
    printed = capsys.readouterr().out
    assert printed.count("#!/bin/bash") == 2
    assert "aprun -n 4 -N 4 -d 32 -j 2 -cc depth" in printed
    assert "aprun -n 8 -N 4 -d 32 -j 2 -cc depth" in printed
    assert printed.count("#COBALT -O scaling\n") == 2
    assert f"FOLDER={tmp_path}/runs/studies/digits/DATE_TIME_scale_weak/points/n4-r1\n" in printed
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="--directive -O scaling is for points that are jobs: expected --on slurm"):
        StudyOptions("digits", directives=["-O scaling"])
    with pytest.raises(ConfigError, match=r"--dry-run prints the jobs of a new study: expected --on slurm"):
        StudyOptions("digits", dry_run=True)


@pytest.mark.system
def test_points_are_jobs_of_which_each_waits_for_the_one_before(cluster: Path) -> None:
    folder, definition = make(cluster)
    assert submit_missing(folder, definition) == ["n1-r1", "n2-r1", "n4-r1"]
    asked = (cluster / "asked").read_text().splitlines()
    assert [line.split()[1] for line in asked] == [
        str(folder.run("n1-r1").job_script),
        "--dependency=afterany:41",
        "--dependency=afterany:42",
    ]
    state = read_state(folder, "n4-r1")
    assert (state.state, state.job, state.attempts) == ("submitted", "43", 1)
    assert read_job(folder.run("n4-r1")).ids == ["43"]
    assert folder.run("n4-r1").job_script.stat().st_mode & 0o077 == 0, "it may hold variables of its user"
    script = folder.run("n4-r1").job_script.read_text()
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --ntasks-per-node=2\n" in script
    assert "#SBATCH --nodes=1\n" in folder.run("n1-r1").job_script.read_text()
    assert submit_missing(folder, definition) == []


@pytest.mark.system
def test_only_what_is_missing_is_submitted_and_what_failed_if_asked(cluster: Path) -> None:
    folder, definition = make(cluster)
    write_state(folder, "n1-r1", PointState("failed", reason="x", attempts=1, job="7"))
    write_state(folder, "n2-r1", PointState("running", attempts=1, job="8"))
    assert submit_missing(folder, definition) == ["n4-r1"]
    assert "afterany:8 " in (cluster / "asked").read_text()
    assert submit_missing(folder, definition, retry=True) == ["n1-r1"]


def test_a_scheduler_that_is_not_here_is_told_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch, with which jobs are submitted to slurm, is not on this machine"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        ("slurm", "--parsable --dependency=afterany:7 "),
        ("pbs", "-W depend=afterany:7 "),
        ("cobalt", "--mode script --dependencies 7 "),
    ],
)
def test_every_scheduler_is_told_in_its_own_words(scheduler: str, words: str, cluster: Path) -> None:
    script = cluster / "job.sh"
    script.write_text("")
    assert scheduler_of(scheduler).submit(script, "7") == "41"
    assert (cluster / "asked").read_text() == f"{words}{script}\n"


@pytest.mark.parametrize(
    ("known", "outcome", "expected", "reason"),
    [
        (JobState("waiting"), None, "submitted", None),
        (JobState("running"), None, "running", None),
        (JobState("ending"), None, "running", None),
        (JobState("ended"), "complete", "finished", None),
        (None, "complete", "finished", None),
        (JobState("ended"), "failed", "failed", "the disk is full."),
        (JobState("cancelled"), None, "failed", "its job is cancelled"),
        (None, None, "failed", "its job ended; no result was recorded"),
    ],
)
def test_a_point_stands_as_its_job_does(known, outcome, expected, reason, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    end = {"state": "failed", "ended": "2026-11-16T10:00:09+00:00", "failure": "the disk is full."}
    (tmp_path / "record.json").write_text(json.dumps(end))
    attempt = Attempt(
        "41", "2026-11-16T10:00:00+00:00", 0, code=2 if outcome == "failed" else None, outcome=outcome, ended="then"
    )
    job = JobRecord("slurm", "slurm", "digits", {}, 10, "job.sh", ids=["41"], attempts=[attempt])
    state = state_of_job(PointState("submitted", job="41"), Status(RunFolder(tmp_path), job, known, 0, None, {}))
    assert (state.state, state.reason, state.job) == (expected, reason, "41")
