"""Runs that are stopped from outside, get stuck, or wait for a slow rank."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Tutti
from rank_jobs import read_ledger, read_losses, run_ranks, train
from waiting import wait_until

from tutti.config.load import resolve
from tutti.errors import Interrupted, RankLost, TuttiError
from tutti.runs.folder import create_folder, owned, write_config
from tutti.train import job

VALUES: dict[str, Any] = {
    "recipe": "stop",
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "small_cnn", "width": 8, "dropout": 0.3},
    "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9},  # Adam would make large what the order of sums changes
    "batch": {"global": 64, "micro": 16},
    "epochs": 3,
    "checkpoint": {"every_epochs": None},
    "log": {"every_steps": 5, "ledger": True, "tensorboard": False},
}
NETWORK = """
import os, time
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.scores = nn.Linear(64, num_classes)
        self.passes = 0

    def forward(self, images):
        self.passes += 1
        if os.environ["RANK"] == "1":
            fall_asleep(self.passes)
        return self.scores(images.flatten(1))

def fall_asleep(passes):
    if os.environ["HOW"] == "for ever" and passes > 20:
        time.sleep(3600)
    if os.environ["HOW"] == "a little":
        time.sleep(0.02)
"""


def stopped(values: dict[str, Any], at_step: int, rank: int, how: str) -> tuple[type, str, int]:
    """Train until a signal to one rank, or the clock, stops the run; the error and the step it gave."""
    end_step = job.Job.end_step

    def end_step_and_stop(self: job.Job, loss: Any) -> None:
        end_step(self, loss)
        if self.step == at_step and self.group.rank == rank:
            if how == "clock":
                self.monitor._ends = time.time() + 1
                os.write(self.monitor._wake, b"\0")
            else:
                os.kill(os.getpid(), signal.Signals[how])
        if self.step > at_step:  # a run of this size would be over before the ranks know of it
            wait_until(lambda: self.monitor.stop_reason, lambda: "the ranks do not know that they are to stop")

    job.Job.end_step = end_step_and_stop
    return end_of_training(values)


def end_of_training(values: dict[str, Any]) -> tuple[type, str, int]:
    """Train; return the type, the text and the exit code of the error that ended it."""
    try:
        train(values)
    except TuttiError as error:
        return type(error), str(error), error.exit_code
    return type(None), "finished", 0


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "after", "how", "reason"),
    [
        (2, 2, "SIGUSR1", "on SIGUSR1"),
        (4, 1, "SIGTERM", "on SIGTERM"),
        (2, 4, "clock", "before the end of the allocation"),
    ],
)
def test_a_stopped_run_saves_at_one_step_and_goes_on_without_losing_a_sample(
    tmp_path: Path, ranks: int, after: int, how: str, reason: str
) -> None:
    rank = 0 if how == "clock" else ranks - 1
    ends = run_ranks(ranks, stopped, VALUES | {"out": str(tmp_path / "cut")}, 29, rank, how)
    folder = next((tmp_path / "cut" / "stop").iterdir())
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    step = int(latest.removeprefix("step-"))
    text = f"stopped {reason} after step {step} of 66. Resume with: tutti train {folder}"
    assert ends == [(Interrupted, text, 75)] * ranks
    assert 29 <= step < 66
    record = json.loads((folder / "record.json").read_text())
    assert (record["state"], record["step"]) == ("interrupted", step)

    whole = run_ranks(1, train, VALUES | {"out": str(tmp_path / "whole")})[0]
    resumed = run_ranks(after, train, VALUES, str(folder / "checkpoints" / latest))[0]
    assert read_ledger(resumed["folder"]) == read_ledger(whole["folder"])
    ours, theirs = read_losses(resumed["folder"]), read_losses(whole["folder"])
    assert [loss[:2] for loss in ours] == [loss[:2] for loss in theirs]
    assert max(abs(a[2] - b[2]) for a, b in zip(ours, theirs, strict=True)) < 1e-4


def cut_in_validation(values: dict[str, Any], how: str) -> tuple[type, str, int]:
    """Train until a signal comes in the validation of the second epoch; the error that it gave."""
    goes_on = job.Job._validation_goes_on

    def goes_on_until_the_signal(self: job.Job) -> bool:
        if self.step == 44 and how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.step == 44 and self.group.rank == 1 and self.monitor.stop_reason is None:
            os.kill(os.getpid(), signal.Signals[how])
        if self.step == 44:
            wait_until(lambda: self.monitor.stop_reason, lambda: "the ranks do not know of the signal")
        return goes_on(self)

    job.Job._validation_goes_on = goes_on_until_the_signal
    return end_of_training(values)


@pytest.mark.ranks
@pytest.mark.parametrize(("how", "every_epochs"), [("SIGUSR1", None), ("SIGUSR1", 1), ("SIGKILL", 1)])
def test_a_stop_in_validation_saves_the_epoch_and_validates_it_again(
    tmp_path: Path, how: str, every_epochs: int | None
) -> None:
    values = VALUES | {"checkpoint": {"every_epochs": every_epochs}}
    ends = run_ranks(2, cut_in_validation, values | {"out": str(tmp_path / "cut")}, how, expect_failure=True)
    folder = next((tmp_path / "cut" / "stop").iterdir())
    if how == "SIGUSR1":
        text = f"stopped on SIGUSR1 after step 44 of 66. Resume with: tutti train {folder}"
        assert ends == [(Interrupted, text, 75)] * 2
    assert (folder / "checkpoints" / "latest").read_text() == "step-000044\n"
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["epoch"] for event in events if event["event"] == "epoch"] == [1]
    resumed = run_ranks(2, train, values, str(folder / "checkpoints" / "step-000044"))[0]
    whole = run_ranks(2, train, values | {"out": str(tmp_path / "whole")})[0]
    assert read_losses(resumed["folder"]) == read_losses(whole["folder"])
    assert read_ledger(resumed["folder"]) == read_ledger(whole["folder"])
    assert resumed["weights"] == whole["weights"]


@pytest.mark.ranks
def test_a_folder_in_which_another_process_trains_is_refused(tutti: Tutti, tmp_path: Path) -> None:
    folder = create_folder(str(tmp_path / "runs"), "digits", 1)
    write_config(folder, resolve("digits", ["epochs=1"]).config.as_yaml())
    with owned(folder):
        done = tutti("train", str(folder.path))
        assert list(folder.path.glob("record.json")) == []
    assert done.code == 2, done.all
    assert f"error: {folder.path} is in use by process {os.getpid()} on host {os.uname().nodename}, since" in done.err


def left_alone(values: dict[str, Any]) -> tuple[type, str, int, bool]:
    """Train until rank 1 is gone without a word; what the others say."""
    end_step = job.Job.end_step

    def end_step_or_die(self: job.Job, loss: Any) -> None:
        end_step(self, loss)
        if self.step == 12 and self.group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    job.Job.end_step = end_step_or_die
    try:
        train(values)
    except TuttiError as error:
        return type(error), str(error), error.exit_code, error.told
    return type(None), "finished", 0, False


@pytest.mark.ranks
def test_ranks_that_lose_one_name_it_and_ask_to_be_started_again(tmp_path: Path) -> None:
    ends = run_ranks(3, left_alone, VALUES | {"out": str(tmp_path), "batch": {"global": 48}}, expect_failure=True)
    host = os.uname().nodename
    assert isinstance(ends[1], RuntimeError)  # killed
    others = [ends[0], ends[2]]
    # A rank whose main thread has not noticed the loss when the finding arrives is ended by it, with the same code.
    told = [end for end in others if str(end) not in ("rank 0: 76", "rank 2: 76")]
    for end in told:
        assert end[0] is RankLost and end[2] == 76
        assert f"missing rank 1 on host {host}." in end[1]
        assert f"no answer from rank 1 on host {host}: the process or its host has ended" in end[1]
    assert [end[3] for end in told].count(False) == 1, "one of them tells the user"
    record = json.loads(next(tmp_path.glob("stop/*/record.json")).read_text())
    assert (record["state"], record["cause"], record["failed_rank"]) == ("failed", "rank_lost", 1)


@pytest.mark.ranks
def test_a_rank_that_sleeps_for_ever_is_named_with_its_step_and_its_calls(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NETWORK)
    options = ["model.name=net:Net", "runtime.timeout_seconds=15", "data.shift=0"]
    done = tutti("train", "digits", "-n", "2", *options, HOW="for ever")
    assert done.code == 1, done.all
    host = os.uname().nodename
    assert f"did not end within 15 s: missing rank 1 on host {host}." in done.err
    assert "rank 0 arrived: in the backward pass, where gradients are averaged, of step" in done.err
    assert f"rank 1 on host {host} is in the forward pass of step" in done.err
    assert "in fall_asleep: time.sleep(3600)" in done.err
    folder = next((tmp_path / "runs" / "digits").iterdir())
    found = json.loads((folder / "logs" / "hang.json").read_text())
    assert (found["arrived"], found["behind"], found["silent"]) == ([0], [1], [])
    record = json.loads((folder / "record.json").read_text())
    assert (record["state"], record["cause"], record["failed_rank"]) == ("failed", "timeout", 1)
    assert "missing rank 1" in record["failure"]


@pytest.mark.ranks
def test_a_slow_rank_is_named_on_the_screen_and_in_the_record(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NETWORK)
    done = tutti("train", "digits", "-n", "2", "model.name=net:Net", "epochs=1", HOW="a little")
    assert done.code == 0, done.all
    host = os.uname().nodename
    assert done.out.count("slow rank: ") == 1
    assert f"slow rank: rank 1 on host {host} takes" in done.out and "all wait for it" in done.out
    record = json.loads(next((tmp_path / "runs" / "digits").glob("*/record.json")).read_text())
    assert [(slow["rank"], slow["host"]) for slow in record["slow_ranks"]] == [(1, host)]


@pytest.mark.ranks
def test_a_run_folder_goes_on_and_a_finished_one_says_so(tutti: Tutti, tmp_path: Path) -> None:
    started = tutti("train", "digits", "epochs=2", "model.width=4", TUTTI_JOB_ENDS=str(time.time() - 60))
    assert started.code == 75, started.all
    folder = next((tmp_path / "runs" / "digits").iterdir())
    assert f"Resume with: tutti train {folder.relative_to(tmp_path)}" in started.err
    assert "error" not in started.err
    went_on = tutti("train", str(folder), "-n", "2")
    assert went_on.code == 0, went_on.all
    assert list((tmp_path / "runs" / "digits").iterdir()) == [folder]
    again = tutti("train", str(folder))
    assert (again.code, again.out) == (0, f"the run in {folder} is finished: nothing is left to do\n")
    vain = tutti("train", str(folder), "optim.lr=0.5")
    assert (
        vain.code == 2 and "is finished after step 44, and it has ended by epochs: optim.lr=0.5 would have" in vain.err
    )
    refused = tutti("train", str(folder), "--resume")
    assert refused.code == 2 and "resumes from its newest checkpoint. Leave it out." in refused.err
