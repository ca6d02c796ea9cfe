"""The time of a step by phase, on clocks that the tests turn."""

from collections.abc import Callable

import pytest
import torch

from tutti.config.schema import LogConfig
from tutti.runs.step_parts import TIMED, StepPart
from tutti.train import timing
from tutti.train.timing import Clock, HostTimer, NoTimer, StreamTimer, combine, make_timer


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Turns the clock on by some seconds; an event of a stream keeps the time at which it was recorded."""
    now = [100.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, other: "Event") -> float:
            return (other.at - self.at) * 1000

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def timed(*seconds: float) -> dict[StepPart, float]:
    """Seconds of the parts that a timer marks."""
    return dict(zip(TIMED, seconds, strict=True))


def step(timer: timing.StepTimer, turn: Callable[[float], None], between: float = 0.0) -> None:
    """A step of 1 s for data, 2 forward, 3 backward, 0.5 to communicate, 0.25 to update."""
    turn(between)
    timer.begin()
    for part, seconds in zip(TIMED, (1.0, 2.0, 3.0, 0.5, 0.25), strict=True):
        turn(seconds)
        timer.ended(part)


def test_the_clock_adds_up_phases_and_leaves_out_what_lies_between_steps(turn: Callable[[float], None]) -> None:
    timer = HostTimer()
    for _ in range(3):
        step(timer, turn, between=7.0)
    assert timer.close(3)() == timed(3.0, 6.0, 9.0, 1.5, 0.75)
    assert set(timer.close(0)().values()) == {0.0}, "a window begins anew"


def test_the_stream_counts_from_the_end_of_one_step_to_that_of_another(turn: Callable[[float], None]) -> None:
    timer = StreamTimer()
    for _ in range(4):
        step(timer, turn)
    assert timer.close(4)() == pytest.approx(timed(4, 8, 12, 2, 1))


def test_every_so_many_steps_one_stands_for_the_others(turn: Callable[[float], None]) -> None:
    timer = StreamTimer(every_steps=10)
    for number in range(50):
        step(timer, turn, between=5.0 if number % 10 == 5 else 0.0)
    phases = timed(50, 100, 150, 25, 12.5)
    assert timer.close(50)() == pytest.approx(phases)
    assert len(timer._spare) == 5 * 5 + 5, "five steps are marked, and the end of every step before one that is"


def test_a_checkpoint_between_two_steps_is_no_waiting_for_data(turn: Callable[[float], None]) -> None:
    timer = StreamTimer()
    step(timer, turn)
    step(timer, turn)
    turn(60.0)
    timer.paused()
    step(timer, turn)
    assert timer.close(3)()[StepPart.DATA] == pytest.approx(3)


def test_a_window_of_one_step_tells_all_but_its_batch(turn: Callable[[float], None]) -> None:
    timer = StreamTimer()
    step(timer, turn)
    assert timer.close(1)() == pytest.approx(timed(0, 2, 3, 0.5, 0.25))
    assert set(timer.close(0)().values()) == {0.0}


def test_a_run_may_go_without() -> None:
    timer = make_timer(torch.device("cpu"), LogConfig(phases=False))
    assert isinstance(timer, NoTimer)
    assert timer.close(5)() == {}


def test_the_rank_that_comes_last_tells_what_the_exchange_takes_and_the_others_wait() -> None:
    early = timed(1.0, 2.0, 3.0, 3.0, 0.5)
    late = timed(2.0, 3.0, 3.0, 1.0, 0.5)
    told = combine([early, late], 10.0)
    assert told["communication_seconds"] == 1.0
    assert told["waiting_seconds"] == 1.0
    assert (told["communication_share"], told["waiting_share"], told["data_share"]) == (0.1, 0.1, 0.15)
    parts = ("data", "forward", "backward", "communication", "waiting", "update", "rest")
    assert sum(told[f"{part}_seconds"] for part in parts) == pytest.approx(10.0), "together they are the window"


def test_one_rank_waits_for_nobody() -> None:
    told = combine([dict.fromkeys(TIMED, 1.0) | {StepPart.COMMUNICATION: 0.0}], 5.0)
    assert "communication_share" not in told
    assert told["rest_seconds"] == 1.0


def test_a_window_may_be_read_while_the_next_is_marked(turn: Callable[[float], None]) -> None:
    timer = StreamTimer()
    for _ in range(4):
        step(timer, turn)
    read = timer.close(4)
    step(timer, turn)
    assert read() == pytest.approx(timed(4, 8, 12, 2, 1))
    step(timer, turn)
    assert timer.close(2)() == pytest.approx(timed(2, 4, 6, 1, 0.5))


def test_a_run_that_begins_with_a_validation_times_its_first_window_from_its_first_step(
    turn: Callable[[float], None],
) -> None:
    clock = Clock()
    with clock.paused("validation"):
        turn(60.0)
    clock.start()
    turn(5.0)
    assert clock.close()() == (5.0, 0.0)
    assert clock.totals["validation"] == 60.0
