"""Submitted runs on a real Slurm, to the end of the allocation and beyond: what happens to them, and what they say."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from conftest import REPOSITORY
from rank_jobs import read_ledger
from slurm import TUTTI, Cluster, wait_until

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm")]

# 352 steps of a few milliseconds, a checkpoint every 44.
LONG = ["epochs=16", "batch.global=64", "log.ledger=true", "checkpoint.every_epochs=2", "log.tensorboard=false"]
NETWORK = """
import os, signal, time
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.scores = nn.Linear(64, num_classes)

    def forward(self, images):
        if os.environ.get("SLURM_PROCID") == "1":
            misfortune()
        return self.scores(images.flatten(1))

calls = 0

def misfortune():
    global calls
    calls += 1
    how = os.environ["HOW"]
    if how == "sleep" and calls > 20:
        time.sleep(3600)
    while how == "die once" and calls == 200 and not os.path.exists("signalled"):
        time.sleep(0.01)
    if how == "die once" and calls == 250 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait for another start" and calls == 600 and os.environ.get("SLURM_RESTART_COUNT") is None:
        time.sleep(3600)
    if how == "slowly":
        time.sleep(0.05)
    if how == "fail":
        raise ValueError("no such luck")
"""
Submit = Callable[..., Path]


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Submit:
    """`tutti submit` on the login host; the folder of the run."""
    (tmp_path / "net.py").write_text(NETWORK)

    def call(recipe: str, *words: str, **env: str) -> Path:
        given = ["submit", recipe, "--on", "slurm", "--time", "5", *words]
        done = cluster.run(*TUTTI.split(), *given, cwd=tmp_path, env=env)
        assert done.code == 0, done.all
        match = re.search(r"^run folder\s*:?\s*(\S+)", done.out, re.MULTILINE)
        assert match and "tutti logs" in done.out, done.out
        return tmp_path / match[1]

    return call


def job_of(folder: Path) -> str:
    return json.loads((folder / "job.json").read_text())["ids"][0]


def printed(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("logs/job-*.out"))


def state(folder: Path) -> str:
    return json.loads((folder / "record.json").read_text())["state"] if (folder / "record.json").exists() else "none"


def wait_for_text(folder: Path, text: str) -> None:
    wait_until(lambda: text in printed(folder), lambda: f"{text!r} does not come:\n{printed(folder)}")


def told_any(folder: Path, texts: Sequence[str]) -> bool:
    return any(text in printed(folder) for text in texts)


def wait_for_end(cluster: Cluster, folder: Path, *states: str) -> str:
    cluster.wait(job_of(folder), *(states or ("COMPLETED", "FAILED", "CANCELLED")))
    return printed(folder)


def undisturbed(folder: Path) -> dict[int, list[int]]:
    """The samples of every step of a run that nothing happens to."""
    from tutti.config.load import load
    from tutti.config.plan import make_plan
    from tutti.data.order import SampleOrder

    config = load(str(folder / "config.yaml"))
    plan = make_plan(config, 1, 1437)
    order = SampleOrder(plan, config.seed)
    return {step + 1: order.rank_ids(step, 0).tolist() for step in range(plan.total_steps)}


@pytest.mark.parametrize(
    ("wishes", "hosts"),
    [
        pytest.param(
            ["--nodes", "4", "--ranks-per-node", "2"],
            ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"],
            marks=pytest.mark.slow,  # eight ranks
        ),
        (["--nodes", "3", "--ranks", "4"], ["n1", "n1", "n2", "n3"]),
    ],
    ids=["equal", "unequal"],
)
def test_a_submitted_run_leaves_a_whole_folder(
    cluster: Cluster, submit: Submit, wishes: list[str], hosts: list[str]
) -> None:
    folder = submit("digits", *wishes, "--preflight", "batch.global=128", "epochs=4")
    text = wait_for_end(cluster, folder)
    record = json.loads((folder / "record.json").read_text())
    assert (record["state"], record["ranks"]) == ("finished", len(hosts)), text
    assert record["segments"][0]["launcher"] == "Slurm" and record["segments"][0]["hosts"] == hosts
    assert record["results"]["valid_accuracy"] > 0.9
    assert text.count("run folder:") == 1, "rank 0 speaks for all"
    left = {path.name for path in folder.iterdir()}
    assert left >= {"config.yaml", "record.json", "metrics.jsonl", "tensorboard", "checkpoints", "curves.png"}
    assert left >= {"job.sh", "job.json", "doctor.json"}
    assert len(list(folder.glob("logs/rank-*.log"))) == len(hosts)


def test_a_signal_in_mid_epoch_and_a_killed_rank_cost_no_sample(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    options = ["--nodes", "2", "--ranks-per-node", "1", "model.name=net:Net", "data.shift=0"]
    folder = submit("digits", *options, *LONG, HOW="die once")
    wait_for_text(folder, "step 60/")
    assert cluster.run("scancel", "--signal=USR1", job_of(folder)).code == 0
    (tmp_path / "signalled").touch()
    text = wait_for_end(cluster, folder)
    assert "stopped on SIGUSR1 after step" in text
    assert "it was stopped by a signal or at the end of its time; start 2 of at most 11" in text
    assert "missing rank 1 on host n2." in text
    assert "it lost ranks or hosts; start 3 of at most 11" in text
    assert state(folder) == "finished", text
    assert read_ledger(folder) == undisturbed(folder)
    starts = json.loads((folder / "job.json").read_text())["attempts"]
    assert [start["code"] for start in starts] == [75, 76, 0]
    status = cluster.run(*TUTTI.split(), "status", str(folder), cwd=tmp_path)
    assert status.code == 0 and "step 352/352 (100.0%)" in status.out and "complete" in status.out


def test_time_that_runs_out_twice_is_gone_on_with_twice(cluster: Cluster, submit: Submit) -> None:
    # The run keeps all of its hour but a few seconds as its margin; where it makes no step in them, it gets more.
    words = ["--nodes", "1", "--ranks-per-node", "2", "--time", "60", "model.name=net:Net", "data.shift=0", *LONG[1:]]
    for seconds in (10, 60, 300):
        folder = submit("digits", *words, "epochs=400", f"runtime.margin_seconds={3600 - seconds}", HOW="slowly")
        ends = ("start 3 of at most 11", "the time limit is too short")
        wait_until(partial(told_any, folder, ends), partial(printed, folder))
        if ends[1] not in printed(folder):
            break
    assert printed(folder).count("stopped before the end of the allocation after step") == 2
    cancelled = cluster.run(*TUTTI.split(), "cancel", str(folder))
    assert cancelled.code == 0, cancelled.all
    cluster.wait(job_of(folder), "CANCELLED", "FAILED", "COMPLETED")
    ledger, whole = read_ledger(folder), undisturbed(folder)
    assert ledger == {step: whole[step] for step in ledger} and sorted(ledger) == list(range(1, len(ledger) + 1))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "sleep",
            [
                "did not end within 15 s: missing rank 1 on host n2.",
                "rank 1 on host n2 is in the forward pass of step",
                "in misfortune: time.sleep(3600)",
            ],
        ),
        ("fail", ["rank 1 on host n2 failed: ValueError: no such luck", "in misfortune"]),
    ],
)
def test_a_run_that_would_fail_again_says_why_and_is_not_started_again(
    cluster: Cluster, submit: Submit, how: str, said: list[str]
) -> None:
    words = [
        "--nodes",
        "2",
        "--ranks-per-node",
        "1",
        "model.name=net:Net",
        "data.shift=0",
        "runtime.timeout_seconds=15",
    ]
    folder = submit("digits", *words, HOW=how)
    text = wait_for_end(cluster, folder, "FAILED")
    for each in said:
        assert each in text, text
    assert "the run failed (exit code 1), and another start would fail, too" in text
    job = json.loads((folder / "job.json").read_text())
    assert [attempt["outcome"] for attempt in job["attempts"]] == ["failed"]
    assert state(folder) == "failed"


def test_a_run_whose_node_loses_its_slurmd_goes_on_on_others_from_its_checkpoint(
    cluster: Cluster, submit: Submit
) -> None:
    words = ["--nodes", "2", "--ranks-per-node", "1", "model.name=net:Net", "data.shift=0"]
    folder = submit("digits", *words, *LONG, "epochs=24", "checkpoint.every_epochs=1", HOW="wait for another start")
    wait_for_text(folder, "step 110/")
    cluster.signal("n2", "KILL")
    wait_for_text(folder, "resumed from")
    text = wait_for_end(cluster, folder)
    assert state(folder) == "finished", text
    hosts = [segment.get("hosts") for segment in json.loads((folder / "record.json").read_text())["segments"]]
    assert hosts[0] == ["n1", "n2"] and "n2" not in hosts[-1], hosts
    assert read_ledger(folder) == undisturbed(folder)


@pytest.fixture
def other_code(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """Node n2 with another version of the package at the same place."""
    copy = tmp_path / "another" / "tutti"
    shutil.copytree(REPOSITORY / "tutti", copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "errors.py").open("a") as file:
        file.write("# one line more\n")
    host = cluster.hosts.by_name["n2"]
    host.shell(f"mount --bind {copy} {REPOSITORY / 'tutti'}")
    yield
    host.shell(f"umount {REPOSITORY / 'tutti'}")


@pytest.mark.usefixtures("other_code")
def test_a_host_with_other_code_is_named_before_anything_is_trained(cluster: Cluster, submit: Submit) -> None:
    folder = submit("digits", "--nodes", "4", "--ranks-per-node", "1")
    text = wait_for_end(cluster, folder, "FAILED")
    assert "hosts do not have the same code:" in text
    assert "rank 1 on host n2 has tutti's code with digest" in text and "all others have tutti's code" in text, text
    assert "and another start would fail, too" in text
    assert "before  epoch" not in text
