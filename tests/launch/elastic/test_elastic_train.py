"""Elastic training: ranks are lost, hosts come and go, and the run is the one that would have been without."""

import functools
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import environment
from intruder import intruding, processes_in, record_sent, recorded_in
from prepared import PYTHON
from rank_jobs import read_ledger, read_losses, reserved_port, run_ranks, train
from waiting import wait_for_end, wait_until

import tutti
from tutti.cli import elastic
from tutti.errors import CheckpointError, ConfigError, LaunchError, TuttiError
from tutti.launch.elastic import member
from tutti.ranks.messages import connect
from tutti.ranks.secret import make_secret

VALUES: dict[str, Any] = {
    "recipe": "elastic",
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "small_cnn", "width": 4, "dropout": 0.3},
    "optim": {"name": "adamw", "lr": 2e-3},
    "batch": {"global": 96, "micro": 16},
    "epochs": 3,
    "checkpoint": {"every_steps": 4, "every_epochs": None},
    "log": {"every_steps": 2, "ledger": True, "tensorboard": False},
}
STEPS = 14 * 3
PARTS = """
import os, signal, time
from pathlib import Path
from tutti.data.builtin import digits

class Steered:
    '''The digits, slow until they may be fast; one rank is lost, or fails, after some of them.'''

    def __init__(self, split, shift=0, lost=None, fails=None, slow_below=0):
        self.data, self.split, self.count = digits(split, shift), split, 0
        self.lost, self.fails, self.slow_below = lost, fails, slow_below
        self.input_shape, self.num_classes = (1, 8, 8), 10

    def __len__(self):
        return len(self.data)

    def batch(self, ids, draws):
        if self.split == "train":
            self.steer()
        return self.data.batch(ids, draws)

    def steer(self):
        self.count += 1
        if self.count == 20 and os.environ["RANK"] == str(self.lost) and not Path("lost").exists():
            Path("lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == 5 and os.environ["RANK"] == str(self.fails):
            raise OSError("the scratch disk is gone")
        if int(os.environ["WORLD_SIZE"]) < self.slow_below and not Path("fast").exists():
            time.sleep(0.3)
"""


class Launcher:
    """A `tutti train` that runs beside the test."""

    def __init__(self, folder: Path, *words: str, **env: str) -> None:
        self.folder = folder
        self.log = folder / f"launcher-{len(list(folder.glob('launcher-*')))}.log"
        with self.log.open("w") as output:
            command = [PYTHON, "-m", "tutti", "train", "recipe.yaml", *words]
            env = environment(PYTHONPATH=str(folder), **env)
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)

    def wait_for(self, pattern: str) -> str:
        """The first match in what it prints."""
        return wait_until(lambda: re.search(pattern, self.log.read_text()), self.log.read_text, self.process)[0]

    def end(self) -> tuple[int, str]:
        """Its exit code and all that it has printed."""
        return wait_for_end(self.process, self.log.read_text), self.log.read_text()


@contextmanager
def launched(folder: Path, *words: str, **env: str) -> Iterator[Launcher]:
    """A launcher that does not outlive the test."""
    launcher = Launcher(folder, *words, **env)
    try:
        yield launcher
    finally:
        launcher.process.kill()
        launcher.process.wait()


def write_recipe(folder: Path, batch: dict[str, int] | None = None, **data: Any) -> None:
    steered = {"name": "parts:Steered", "shift": 1} | data
    values = VALUES | {"data": steered, "batch": batch or VALUES["batch"], "out": str(folder / "runs")}
    del values["recipe"]
    (folder / "recipe.yaml").write_text(json.dumps({"base": values}))
    (folder / "parts.py").write_text(PARTS)


def run_folder(folder: Path) -> Path:
    return next(path.parent for path in (folder / "runs").rglob("config.yaml"))


def read_record(folder: Path) -> dict[str, Any]:
    return json.loads((run_folder(folder) / "record.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same run on one rank."""
    return run_ranks(1, train, VALUES | {"out": str(tmp_path_factory.mktemp("whole"))})[0]["folder"]


def assert_same_run(folder: Path, whole: Path) -> None:
    ledger = read_ledger(folder)
    assert ledger == read_ledger(whole)
    assert len(ledger) == STEPS
    for epoch in range(3):
        seen = [i for step in list(ledger)[14 * epoch : 14 * (epoch + 1)] for i in ledger[step]]
        assert len(seen) == len(set(seen)) == 14 * 96, "a sample was seen twice in an epoch"
    ours, theirs = read_losses(folder), read_losses(whole)
    assert [loss[:2] for loss in ours] == [loss[:2] for loss in theirs]
    assert max(abs(a[2] - b[2]) for a, b in zip(ours, theirs, strict=True)) < 1e-4


pytestmark = pytest.mark.xdist_group("elastic")
HOST = os.uname().nodename
elastic_ranks = pytest.mark.ranks


@elastic_ranks
def test_a_killed_rank_leaves_fewer_until_it_is_back_and_no_sample_is_lost(tmp_path: Path, undisturbed: Path) -> None:
    write_recipe(tmp_path, lost=1, slow_below=2)
    with launched(tmp_path, "--min-ranks", "1", "--max-ranks", "2", "--pause", "0.5") as first:
        code, said = first.end()
    assert code == 0, said
    assert f"now on 1 rank (rank lost: 1 on host {HOST}, ended by signal SIGKILL)\n" in said
    _, on_one, on_two = said.split("now on ")
    assert "resumed from" in on_one and "  loss " in on_one
    assert on_two.startswith("2 ranks\n") and "resumed from" in on_two
    assert [segment["ranks"] for segment in read_record(tmp_path)["segments"]] == [2, 1, 2]
    assert_same_run(run_folder(tmp_path), undisturbed)


@elastic_ranks
@pytest.mark.slow
def test_a_second_host_is_taken_in_and_its_loss_survived(tmp_path: Path, undisturbed: Path) -> None:
    write_recipe(tmp_path, slow_below=3)
    with launched(tmp_path, "--min-ranks", "1", "--max-ranks", "2", "-n", "1") as first:
        where = first.wait_for(rf"--join {HOST}:\d+").split()
        first.wait_for("step 2/42")
        with launched(tmp_path, *where, "-n", "1") as second:
            first.wait_for(rf"(?s)now on 2 ranks \(host {HOST} has joined\)\n.*resumed from .*  loss ")
            second.process.kill()
        first.wait_for(rf"now on 1 rank \(rank lost: 1 on host {HOST}, which was lost\)\n")
        (tmp_path / "fast").touch()
        code, said = first.end()
    assert code == 0, said
    assert [segment["ranks"] for segment in read_record(tmp_path)["segments"]] == [1, 2, 1]
    assert_same_run(run_folder(tmp_path), undisturbed)


@elastic_ranks
def test_an_intruder_changes_nothing_and_ends_nothing(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path, slow_below=3)
    secret = make_secret()
    words = ["--min-ranks", "1", "--max-ranks", "2", "-n", "2"]
    with intruding(tmp_path / "intruder") as intrusion, launched(tmp_path, *words, **secret.environment()) as first:
        port = int(first.wait_for(rf"--join {HOST}:\d+").rpartition(":")[2])
        first.wait_for("step 2/42")
        monkeypatch.setattr(socket.socket, "sendall", socket.socket.sendall)
        record_sent(tmp_path / "intruder")
        with connect("127.0.0.1", port, secret) as spare:
            join = {"host": "evil", "recipe": "recipe", "overrides": [], "version": tutti.__version__}
            spare.send("join", **join | {"slots": 1, "order": -1})
            assert "position -1 among the hosts: expected 0 to" in next(spare.messages())["text"]
        monkeypatch.setattr(member, "connect", functools.partial(connect, timeout_seconds=2.0))
        with pytest.raises(LaunchError, match=r"another program answers|the connection was closed by the other end"):
            member.connect_to_leader("127.0.0.1", intrusion.fake_ports[0], secret)
        intrusion.attack(processes_in(tmp_path), recorded_in(tmp_path / "intruder"))
        (tmp_path / "fast").touch()
        code, said = first.end()
    assert code == 0, said
    assert "now on" not in said and "evil" not in said and secret.value.hex() not in said
    assert [segment["ranks"] for segment in read_record(tmp_path)["segments"]] == [2]
    assert_same_run(run_folder(tmp_path), undisturbed)
    files = [path.read_bytes() for path in run_folder(tmp_path).rglob("*") if path.is_file()]
    assert not any(secret.value.hex().encode() in content for content in files)


@elastic_ranks
def test_ranks_over_which_the_batch_does_not_split_wait_and_a_signal_saves(tmp_path: Path) -> None:
    write_recipe(tmp_path, batch={"global": 64, "micro": 16}, slow_below=8)
    with launched(tmp_path, "--min-ranks", "2", "--max-ranks", "4", "-n", "3") as first:
        first.wait_for("now on 2 ranks, 1 more waits as a spare\n")
        first.wait_for("epoch 1/3  step 2/")
        first.process.send_signal(signal.SIGTERM)
        code, said = first.end()
    assert code == 75, said
    latest = (run_folder(tmp_path) / "checkpoints" / "latest").read_text().strip()
    step = int(latest.removeprefix("step-"))
    assert f"stopped on SIGTERM after step {step} of 66. Resume with: tutti train {run_folder(tmp_path)}" in said
    assert read_record(tmp_path)["state"] == "interrupted"


@elastic_ranks
def test_with_too_few_ranks_the_job_ends_and_says_how_to_go_on(tmp_path: Path) -> None:
    write_recipe(tmp_path, lost=0)
    with launched(tmp_path, "--min-ranks", "2", "--max-ranks", "2", "--wait", "0.5", "--pause", "600") as first:
        code, said = first.end()
    lost = f"1 rank here, at least 2 needed (rank lost: 0 on host {HOST}, ended by signal SIGKILL)"
    assert code == 76, said
    assert f"{lost}: waiting 0.5 s for more\n" in said
    folder = run_folder(tmp_path)
    assert f"error: {lost}, for 0.5 s. Resume later with: tutti train {folder} --min-ranks 2 --max-ranks 2\n" in said
    record = read_record(tmp_path)
    assert (record["state"], record["cause"], record["failed_rank"]) == ("failed", "rank_lost", 0)


@elastic_ranks
def test_an_error_of_the_program_ends_the_job(tmp_path: Path) -> None:
    write_recipe(tmp_path, fails=1)
    with launched(tmp_path, "--min-ranks", "1", "--max-ranks", "2") as first:
        code, said = first.end()
    assert code == 1, said
    assert f"error: rank 1 on host {HOST} failed: OSError: the scratch disk is gone. " in said
    assert "now on" not in said
    assert len(read_record(tmp_path)["segments"]) == 1


@pytest.mark.parametrize(
    ("overrides", "asked", "kind", "message"),
    [
        (["batch.per_rank=16", "batch.global=null"], {}, ConfigError, "batch.per_rank=16 with --min-ranks: the global"),
        ([], {"max_ranks": None}, LaunchError, "--min-ranks 2: expected both, of 1 or more, in this order. Try"),
        ([], {"max_ranks": 1}, LaunchError, "--min-ranks 2 --max-ranks 1: expected both"),
        (
            [],
            {"min_ranks": 3, "max_ranks": 3},
            ConfigError,
            "does not split over any of 3 to 3 ranks; it does over 1, 2.",
        ),
        ([], {"ranks": 0}, LaunchError, "-n 0: expected 1 or more ranks"),
        ([], {"resume": "latest"}, CheckpointError, "Give its run folder in place of the recipe."),
        ([], {"join": "nowhere"}, LaunchError, "--join nowhere: expected HOST:PORT, as the first launcher"),
        (
            ["epochs=2"],
            {"join": "a:1"},
            LaunchError,
            "epochs=2 with --join: a job that is joined keeps its own configuration.",
        ),
    ],
)
def test_what_cannot_be_elastic_is_refused(
    overrides: list[str], asked: dict[str, Any], kind: type[TuttiError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment())
    given = {"ranks": None, "min_ranks": 2, "max_ranks": 4, "join": None, "resume": None}
    given |= {"wait_seconds": 1.0, "pause_seconds": 1.0} | asked
    with pytest.raises(kind) as refused:
        elastic.train("digits", overrides, elastic.ElasticRequest(**given))
    assert message in str(refused.value)


def test_a_job_that_is_not_there_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environment())
    with reserved_port() as port:
        where = f"127.0.0.1:{port}"
        asked = elastic.ElasticRequest(1, None, None, where, None, 1.0, 1.0)
        with pytest.raises(LaunchError, match=f"--join {where}: no job answers there .Connection refused.. Give the"):
            elastic.train("digits", [], asked)
