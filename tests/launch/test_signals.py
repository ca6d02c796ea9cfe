"""Signals to a launcher, its ranks or all of them: the run saves and says so, and its record is true."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import environment
from waiting import wait_for_end, wait_until

from tutti.errors import Cause, Interrupted, RankLost
from tutti.launch import local
from tutti.launch.local import StopSignals
from tutti.ranks.failures import NOTES_VARIABLE, Failure, name_signal
from tutti.runs.folder import RunFolder

Sent = list[tuple[set[int], int]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], Sent]:
    """The processes that a launcher takes for its ranks, and the signals that it sends."""
    found, sent = {11, 12}, []
    monkeypatch.setattr(local, "_rank_processes", lambda: set(found))
    monkeypatch.setattr(local, "send_signal", lambda to, number: sent.append((set(to), number)) if to else None)
    return found, sent


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[StopSignals]:
    made = StopSignals(RunFolder(tmp_path))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("number", "forwarded"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGUSR1),
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_a_signal_is_forwarded_once(
    ranks: tuple[set[int], Sent], stop: StopSignals, number: int, forwarded: int
) -> None:
    stop(number, None)
    stop(signal.SIGTERM, None)
    assert ranks[1] == [({11, 12}, forwarded)]


def test_ranks_name_the_signal_that_their_launcher_got(
    ranks: tuple[set[int], Sent], stop: StopSignals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTES_VARIABLE, str(tmp_path))
    assert name_signal(signal.SIGTERM) == "SIGTERM"
    stop(signal.SIGINT, None)
    assert ranks[1] == [({11, 12}, signal.SIGTERM)]
    assert (name_signal(signal.SIGTERM), name_signal(signal.SIGUSR1)) == ("SIGINT", "SIGUSR1")


def test_a_rank_that_starts_after_the_signal_gets_it_too(ranks: tuple[set[int], Sent], stop: StopSignals) -> None:
    found, sent = ranks
    found.clear()
    stop(signal.SIGTERM, None)
    found.add(13)
    wait_until(lambda: sent, lambda: "the rank does not know that it is to stop")
    assert sent == [({13}, signal.SIGTERM)]


def test_a_second_interrupt_ends_the_ranks_at_once(ranks: tuple[set[int], Sent], stop: StopSignals) -> None:
    stop(signal.SIGINT, None)
    stop(signal.SIGINT, None)
    assert ranks[1][-1] == ({11, 12}, signal.SIGKILL)
    failure = stop.explain([], saves=True)
    assert (failure.exit_code, failure.cause) == (130, Cause.INTERRUPTED)
    assert failure.text.startswith("ended at once on a second SIGINT. Resume with: tutti train ")


def test_what_the_ranks_say_comes_before_what_the_launcher_knows(
    ranks: tuple[set[int], Sent], stop: StopSignals
) -> None:
    stop(signal.SIGTERM, None)
    lost = Failure(0, "n1", 1.0, 76, "missing rank 1", True, consequence=True)
    saved = Failure(1, "n1", 2.0, Interrupted.exit_code, "stopped on SIGTERM after step 3 of 9", True, False)
    failed = Failure(1, "n1", 2.0, 1, "the disk is gone", False, False)
    assert stop.explain([lost, saved], saves=True) == saved
    assert stop.explain([lost, failed], saves=True) == failed
    early = stop.explain([lost], saves=True)
    assert (early.exit_code, early.text.partition(".")[0]) == (75, "stopped on SIGTERM too early to save")
    assert stop.explain([], saves=False).exit_code == 128 + signal.SIGTERM


def test_an_interrupt_before_the_ranks_are_started_is_told_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "threads_per_rank", interrupted)
    failure = local.start_ranks(2, [], RunFolder(tmp_path), forked=True, saves=True)
    assert failure is not None
    assert (failure.exit_code, failure.cause) == (75, Cause.INTERRUPTED)
    assert failure.text == f"stopped on SIGINT too early to save. Resume with: tutti train {tmp_path}"
    with pytest.raises(KeyboardInterrupt):  # the script of a user
        local.start_ranks(2, [], RunFolder(tmp_path))


class Launched:
    """A training run of two ranks in a process group of its own."""

    def __init__(self, place: Path, *words: str) -> None:
        self.place = place
        line = [sys.executable, "-m", "tutti", "train", "digits/mlp", "-n", "2", "epochs=1000", "log.every_steps=1"]
        with (place / "printed").open("w") as out:
            self.process = subprocess.Popen(
                [*line, *words], cwd=place, env=environment(), stdout=out, stderr=out, process_group=0
            )

    @property
    def folder(self) -> Path | None:
        return next(iter(self.place.glob("runs/digits/mlp/*")), None)

    def said(self) -> str:
        return (self.place / "printed").read_text()

    def wait(self, ready: Callable[[Path], object]) -> None:
        wait_until(lambda: self.folder is not None and ready(self.folder), self.said, self.process)

    def end(self) -> int:
        return wait_for_end(self.process, self.said)

    def record(self) -> dict[str, object]:
        assert self.folder is not None
        return json.loads((self.folder / "record.json").read_text())


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    made: list[Launched] = []

    def start(*words: str) -> Launched:
        made.append(Launched(tmp_path, *words))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.wait()


def has_trained(folder: Path) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and '"event": "step"' in path.read_text()


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_whole_process_group_saves_the_run(launch: Callable[..., Launched], number: int) -> None:
    run = launch()
    run.wait(has_trained)
    os.killpg(run.process.pid, number)
    assert run.end() == 75, run.said()
    record = run.record()
    assert record["state"] == "interrupted"
    assert run.folder is not None
    assert (run.folder / "checkpoints" / "latest").read_text() == f"step-{record['step']:06d}\n"
    name = signal.Signals(number).name
    said = rf"stopped on {name} after step {record['step']:,} of 22,000\. Resume with: tutti train runs/"
    assert re.search(said, run.said()), run.said()
    assert "Traceback" not in run.said()
    assert "death signal" not in run.said()


@pytest.mark.system
def test_a_signal_while_ranks_start_ends_them_without_a_traceback(launch: Callable[..., Launched]) -> None:
    run = launch()
    run.wait(lambda folder: (folder / "config.yaml").exists())
    os.kill(run.process.pid, signal.SIGINT)
    assert run.end() == 75, run.said()
    assert "Traceback" not in run.said()
    assert "stopped on SIG" in run.said() and "Resume with: tutti train runs/" in run.said()
    assert run.folder is not None
    if (run.folder / "record.json").exists():
        assert run.record()["state"] == "interrupted"


@pytest.mark.system
def test_a_second_interrupt_of_the_launcher_ends_a_run_at_once_and_its_record_says_so(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = launch("data.name=slow:Slow")
    run.wait(lambda _: "asleep" in run.said())
    os.kill(run.process.pid, signal.SIGINT)
    wait_until(lambda: "a second one ends all ranks at once" in run.said(), run.said, run.process)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.end() == 130, run.said()
    record = run.record()
    assert (record["state"], record["cause"]) == ("interrupted", "interrupted")
    assert "ended at once on a second SIGINT. Resume with: tutti train runs/" in run.said()


SLOW = """
import time
from tutti.data.builtin import digits

class Slow:
    '''The digits, whose fifth batch takes an hour.'''

    def __init__(self, split):
        self.data, self.split, self.count = digits(split), split, 0
        self.input_shape, self.num_classes = (1, 8, 8), 10

    def __len__(self):
        return len(self.data)

    def batch(self, ids, draws):
        self.count += self.split == "train"
        if self.count == 5:
            print("asleep", flush=True)
            time.sleep(3600)
        return self.data.batch(ids, draws)
"""


@pytest.mark.system
def test_the_loss_of_the_fork_server_is_named(launch: Callable[..., Launched]) -> None:
    run = launch()
    run.wait(has_trained)
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    lines = {int(child): Path(f"/proc/{child}/cmdline").read_text() for child in children}
    os.kill(next(child for child, line in lines.items() if "forkserver" in line), signal.SIGKILL)
    assert run.end() == RankLost.exit_code
    assert "error: the fork server of the ranks on host " in run.said()
    assert (run.record()["state"], run.record()["cause"]) == ("failed", Cause.RANK_LOST)
