"""What schedulers answer, read into words that all share; the answers are written down here by hand."""

import inspect
import json
from pathlib import Path
from types import ModuleType

import pytest

from tutti.errors import LaunchError
from tutti.launch.cluster import schedulers
from tutti.launch.cluster.schedulers import NAMES, JobState, cobalt, pbs, scheduler_of, slurm

PBS_JOB = {
    "job_state": "R",
    "exec_host": "x3001c0s1b0/0*64+x3001c0s7b1/0*64",
    "Resource_List": {"walltime": "02:00:00"},
    "resources_used": {"walltime": "00:30:10"},
}


def answers(monkeypatch: pytest.MonkeyPatch, module: object, text: str | None) -> None:
    monkeypatch.setattr(module, "call", lambda *words, failing=False: text)


def test_the_schedulers_are_asked_in_the_same_ways() -> None:
    shapes = {
        name: [
            (function, list(inspect.signature(member).parameters))
            for function, member in vars(module).items()
            if inspect.isfunction(member) and member.__module__ == module.__name__ and not function.startswith("_")
        ]
        for name in NAMES
        for module in [scheduler_of(name)]
    }
    assert shapes["slurm"] == shapes["pbs"] == shapes["cobalt"]
    assert [name for name, _ in shapes["slurm"]] == ["values", "end_time", "submit", "query", "cancel", "requeue"]


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("JobId=1 JobName=a b JobState=PENDING Reason=Resources", JobState("waiting", "pending (Resources)")),
        (
            "JobId=1 JobState=RUNNING Reason=None NodeList=n[1-4] TimeLimit=1-00:00:00 RunTime=00:00:05",
            JobState("running", "on n[1-4]", 86395),
        ),
        ("JobState=RUNNING NodeList=n1 TimeLimit=UNLIMITED RunTime=00:00:05", JobState("running", "on n1")),
        ("JobState=COMPLETING Reason=None", JobState("ending", "completing")),
        ("JobState=TIMEOUT Reason=TimeLimit", JobState("ended", "timeout (TimeLimit)")),
        ("JobState=CANCELLED Reason=None", JobState("cancelled", "cancelled")),
        (None, None),
    ],
)
def test_what_slurm_says_of_a_job(monkeypatch: pytest.MonkeyPatch, text: str | None, state: JobState | None) -> None:
    answers(monkeypatch, slurm, text)
    assert slurm.query("1") == state


@pytest.mark.parametrize(
    ("job", "state"),
    [
        (PBS_JOB, JobState("running", "on x3001c0s1b0/0*64+x3001c0s7b1/0*64", 5390)),
        ({"job_state": "R", "exec_host": "n1/0"}, JobState("running", "on n1/0")),
        ({"job_state": "Q", "comment": "Not Running: no nodes"}, JobState("waiting", "Not Running: no nodes")),
        ({"job_state": "F"}, JobState("ended", "")),
    ],
)
def test_what_pbs_says_of_a_job(monkeypatch: pytest.MonkeyPatch, job: dict[str, object], state: JobState) -> None:
    answers(monkeypatch, pbs, json.dumps({"Jobs": {"12.pbs": job}}))
    assert pbs.query("12.pbs") == state


def test_a_job_that_pbs_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, pbs, None)
    assert pbs.query("12.pbs") is None


def test_what_cobalt_says_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, cobalt, "State    Location\n=================\nrunning  3824-3827\n")
    assert cobalt.query("7") == JobState("running", "on 3824-3827")
    answers(monkeypatch, cobalt, "State    Location\n=================\nqueued   None\n")
    assert cobalt.query("7") == JobState("waiting", "queued")
    answers(monkeypatch, cobalt, "")
    assert cobalt.query("7") is None


@pytest.mark.parametrize("module", [slurm, pbs, cobalt], ids=lambda module: module.NAME)
def test_an_answer_without_an_id_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: ModuleType) -> None:
    script = tmp_path / "job.sh"
    script.touch()
    answers(monkeypatch, module, "come back tomorrow")
    with pytest.raises(LaunchError, match=f"{module.SUBMIT} answered 'come back tomorrow': expected a job id"):
        module.submit(script)


@pytest.mark.system
def test_a_command_that_cannot_be_called_is_named() -> None:
    with pytest.raises(LaunchError, match="no-such-command cannot be called: "):
        schedulers.call("no-such-command", failing=True)
    assert schedulers.call("no-such-command") is None
    with pytest.raises(LaunchError, match=r"false failed with exit code 1: it printed nothing\."):
        schedulers.call("false", failing=True)
