"""Log windows that are read one step later, when a GPU has work again: the same lines, whatever comes between."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tutti.config.load import resolve
from tutti.errors import DivergedError, Interrupted
from tutti.ranks.environments import discover
from tutti.ranks.hang_detection import Monitor
from tutti.runs.step_parts import StepPart
from tutti.train.job import Job
from tutti.train.learner import TorchLearner
from tutti.train.metrics import Meter, StepValues, taken
from tutti.train.run import run_rank
from tutti.train.timing import Clock, ClosedWindow, Stragglers, find_first_bad
from tutti.train.torch import TorchFramework

CPU = torch.device("cpu")
CLOCKED = ("time", "samples_per_second")  # and what ends in one of the next
CLOCKED_ENDS = ("seconds", "_share")
WORDS = ["runtime.device=cpu", "log.every_steps=5", "epochs=2", "batch.global=96", "checkpoint.every_epochs=null"]


@pytest.fixture
def runs_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has learners say that they run ahead, as on a GPU; gives the steps after which windows were written."""
    written: list[int] = []
    make, write = TorchLearner.__init__, Job._write_closed

    def made(self: TorchLearner, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        self.runs_ahead = True

    def noted(self: Job[Any]) -> None:
        if self._closed is not None:
            written.append(self.step - self._closed.step)
        write(self)

    monkeypatch.setattr(TorchLearner, "__init__", made)
    monkeypatch.setattr(Job, "_write_closed", noted)
    return written


def trained(out: Path, *words: str, resume: Path | None = None) -> list[dict[str, Any]]:
    """The events of a run, without what a clock has measured."""
    config = resolve("digits", [*WORDS, *words, f"out={out}"]).config
    folder = run_rank(TorchFramework(), config, discover({}), resume=resume).folder
    return events(folder.path)


def events(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if not is_clocked(key)} for line in lines]


def is_clocked(key: str) -> bool:
    return key in CLOCKED or key.endswith(CLOCKED_ENDS)


@pytest.mark.ranks
@pytest.mark.parametrize(("save_every", "late"), [(None, 6), (6, 6), (5, 1)])
def test_a_run_that_is_ahead_writes_the_same_lines(
    tmp_path: Path, save_every: int | None, late: int, request: pytest.FixtureRequest
) -> None:
    """Windows end with steps 1, 5, 10, 14, 15, 20, 25 and 28, epochs with 14 and 28; none is late before a save."""
    words = () if save_every is None else (f"checkpoint.every_steps={save_every}",)
    expected = trained(tmp_path / "plain", *words)
    written = request.getfixturevalue("runs_ahead")
    assert trained(tmp_path / "ahead", *words) == expected
    assert sorted(written) == [0] * (8 - late) + [1] * late


@pytest.mark.ranks
@pytest.mark.parametrize("steps", [1, 10, 12])
def test_a_run_that_is_ahead_writes_its_last_line(tmp_path: Path, steps: int, request: pytest.FixtureRequest) -> None:
    """Nothing else is due at the end of a run that saves no checkpoint and ends within an epoch."""
    expected = trained(tmp_path / "plain", f"max_steps={steps}")
    assert expected[-1]["step"] == steps
    request.getfixturevalue("runs_ahead")
    assert trained(tmp_path / "ahead", f"max_steps={steps}") == expected


@pytest.mark.ranks
def test_a_run_that_diverges_in_its_last_window_fails(tmp_path: Path, runs_ahead: list[int]) -> None:
    with pytest.raises(DivergedError, match="at step 2 "):
        trained(tmp_path, "optim.lr=1e30", "schedule.warmup_steps=0", "max_steps=12", "log.every_steps=100")


@pytest.mark.ranks
def test_a_window_has_the_time_of_its_own_steps(
    tmp_path: Path, runs_ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for a batch belongs to the window of its step, whenever the line of the window before is written."""
    wait, compare, compared = Job.next_batch, Stragglers.compare, []

    def slow(self: Job[Any]) -> Any:
        time.sleep(0.02)
        self.clock.wait_ended(self.clock.wait_began() - 0.02)
        return wait(self)

    def noted(self: Stragglers, own: Any, steps: int, seconds: float, step: int) -> list[str]:
        compared.append((step, steps))
        return compare(self, own, steps, seconds, step)

    monkeypatch.setattr(Job, "next_batch", slow)
    monkeypatch.setattr(Stragglers, "compare", noted)
    config = resolve("digits", [*WORDS, f"out={tmp_path}"]).config
    folder = run_rank(TorchFramework(), config, discover({})).folder
    windows = [line for line in map(json.loads, folder.metrics.read_text().splitlines()) if line["event"] == "step"]
    assert compared == [(1, 1), (5, 4), (10, 5), (14, 4), (15, 1), (20, 5), (25, 5), (28, 3)]
    for line, (_, steps) in zip(windows, compared, strict=True):
        assert 0.02 * steps <= line["data_seconds"] <= line["seconds"]


@pytest.mark.ranks
def test_a_checkpoint_begins_when_a_gpu_has_computed_the_steps_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The totals wait for a GPU: that is the time of the steps, also where a checkpoint is saved within a window."""
    pause, totals = Clock.paused, TorchLearner.totals
    pauses, found = [], []

    @contextmanager
    def noted(self: Clock, what: str) -> Iterator[None]:
        pauses.append(what)
        with pause(self, what):
            yield
        pauses.pop()

    def read(self: TorchLearner) -> torch.Tensor:
        found.append(list(pauses))
        return totals(self)

    monkeypatch.setattr(Clock, "paused", noted)
    monkeypatch.setattr(TorchLearner, "totals", read)
    trained(tmp_path, "checkpoint.every_steps=7", "max_steps=13")
    assert found == [[], []], "at steps 7 and 13"


@pytest.mark.ranks
def test_a_window_that_waits_is_written_before_a_run_stops(
    tmp_path: Path, runs_ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(tmp_path / "whole")
    goes_on = Monitor.continues_after

    def stops(self: Monitor, step: int) -> bool:
        if step == 10:
            monkeypatch.setattr(type(self), "stop_reason", "for a test", raising=False)
        return step < 10 and goes_on(self, step)

    monkeypatch.setattr(Monitor, "continues_after", stops)
    with pytest.raises(Interrupted):
        trained(tmp_path / "stopped")
    (folder,) = (tmp_path / "stopped").glob("*/*")
    assert [line["step"] for line in events(folder)] == [0, 1, 5, 10]
    assert events(folder) == expected[:4]


@pytest.mark.ranks
def test_a_loss_that_is_no_number_is_named_by_its_own_step(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = []
    for name in ("plain", "ahead"):
        with pytest.raises(DivergedError) as caught:
            trained(tmp_path / name, "optim.lr=1e30", "schedule.warmup_steps=0")
        found.append((str(caught.value), caught.value.step))
        if name == "plain":
            request.getfixturevalue("runs_ahead")
    assert found[0] == found[1]
    assert 1 < found[0][1] < 5, "within a window"


def test_phases_are_read_when_a_gpu_has_done_their_work() -> None:
    """Totals wait for the device; the time between events that have not been reached cannot be read."""
    calls: list[str] = []

    def totals() -> torch.Tensor:
        calls.append("totals")
        return torch.tensor([1.0], dtype=torch.float64)

    def phases() -> dict[StepPart, float]:
        calls.append("phases")
        return {StepPart.DATA: 2.0, StepPart.FORWARD: 3.0}

    found = ClosedWindow(5, 1, [], totals, phases, lambda: (1.0, 0.0)).read(rank=1, world_size=3)
    assert [each.tolist() for each in found] == [[1.0], [0.0, 0.0, 2.0, 3.0, 0.0, 0.0]]
    assert calls == ["totals", "phases"]


def test_taken_totals_stay_as_they_were() -> None:
    meter, values = Meter({}, CPU), StepValues((), 4, CPU)
    meter.add_loss(torch.tensor(0.5), 4)
    values.add({"loss": torch.tensor(0.5)}, "run.log")
    read = [meter.take(), taken(values)]
    assert [sums.totals().tolist()[0] for sums in (meter, values)] == [0.0, 0.0]
    meter.add_loss(torch.tensor(7.0), 4)
    values.add({"loss": torch.tensor(7.0)}, "run.log")
    assert [each().tolist() for each in read] == [[2.0, 4.0]] * 2
    assert [sums.totals().tolist() for sums in (meter, values)] == [[28.0, 4.0]] * 2


def test_the_first_bad_loss_of_all_ranks_is_named() -> None:
    class Group:
        rank = 0

        def __init__(self, *others: int | None) -> None:
            self.others = others

        def gather(self, own: int | None) -> list[int | None]:
            return [own, *self.others]

    losses = [1.0, float("nan"), float("inf")]  # of steps 8 to 10, counted from 1
    group: Any = Group(9, None)
    assert find_first_bad(losses, 10, group) == (8, 0)
    group = Group(7, None)
    assert find_first_bad(losses, 10, group) == (7, 1)
    group = Group(None)
    assert find_first_bad([1.0], 10, group) == (9, 0), "a sum of finite losses may overflow"
