"""A second pair of eyes on every rank, in threads beside the one that trains.

They see that the run should stop, and have all ranks agree on the step after which it does. They see that a wait does
not end, and have all ranks tell where they are. Watches of different ranks talk through the store, never through
collectives, which may be what is stuck.
"""

import json
import os
import platform
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from tutti.config.schema import RuntimeConfig
from tutti.errors import DeadlineError, Interrupted, RankLost, TrainingError, TuttiError
from tutti.launch.failure import is_consequence
from tutti.records.files import write_durably
from tutti.records.folder import RunFolder
from tutti.runtime.allocation import allocation_end
from tutti.runtime.ending import end_rank
from tutti.runtime.mail import Mail
from tutti.runtime.placement import Placement
from tutti.runtime.whereabouts import Finding, Phase, Whereabouts, find_missing

_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
_ANSWER_SECONDS = 4.0  # how long a rank may take to say where it is
_QUICK_ANSWER_SECONDS = 1.0  # where it is known that one has gone
_AGREE_SECONDS = 3.0
_VERDICT_SECONDS = 20.0
_WORD_SECONDS = 0.5  # how long word of a failing rank may be under way when its connections are already closed
_DEEPEST = 12  # calls of a stack
_OF_TORCH = ("_wrapped_call_impl", "_call_impl", "_run_ddp_forward")  # in every pass through a module


class Watch:
    """What the main thread tells of itself, and the threads that look on."""

    def __init__(self, placement: Placement, store: dist.Store, hosts: Sequence[str], config: RuntimeConfig) -> None:
        self.folder: RunFolder | None = None  # where a finding is written, once the run has a folder
        self.stop_reason: str | None = None
        self.save_seconds = 0.0  # what a checkpoint has been taking, at most
        self._rank = placement.rank
        self._hosts = hosts
        self._deadline = config.timeout_seconds
        self._margin = config.margin_seconds
        self._interval = min(2.0, config.timeout_seconds / 8)
        self._ends = allocation_end(os.environ) if placement.rank == 0 else None
        self._mail = Mail(store, placement.rank, placement.world_size)
        self._mark: tuple[Phase, int, float] | None = None
        self._main = threading.get_ident()
        self._screen = os.dup(2)  # the real one: what a rank prints goes to its log while it trains
        self._lock = threading.Lock()
        self._begun = 0  # the last step that the main thread has begun
        self._begun_by: dict[int, int] = {}
        self._last: int | None = None  # the step after which all ranks stop
        self._decided = threading.Event()
        self._answers: dict[int, Whereabouts] = {}
        self._answered = threading.Condition()
        self._failed: tuple[int, str, int] | None = None
        self._word = threading.Event()
        self._verdict: tuple[str, int] | None = None
        self._spoken = threading.Event()
        self._explains = False
        self._closed = False
        self._take_signals()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._tick)]
        for thread in self._threads:
            thread.start()

    # What the main thread says.

    def at(self, phase: Phase, step: int) -> None:
        """The main thread begins a part of a step; the time until the next word has a deadline."""
        self._mark = (phase, step, time.monotonic())

    def rests(self) -> None:
        """The main thread does what may take any time."""
        self._mark = None

    def goes_on(self, step: int) -> bool:
        """Whether the step after this one is to be made; all ranks get the same answers."""
        with self._lock:
            if self.stop_reason is None:
                self._begun = step + 1
                return True
        self._decided.wait(_AGREE_SECONDS)  # watches agree among themselves, whatever their main threads do
        if self._failed:
            raise self._known_failure(*self._failed)
        if self._last is None:
            raise self._report("ranks could not agree on a step to stop at", _QUICK_ANSWER_SECONDS)
        return step < self._last

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn a connection that broke, or a wait that was too long, into what is known of its cause."""
        try:
            yield
        except Interrupted:
            raise
        except Exception as error:
            if isinstance(error, DeadlineError) or is_consequence(error):
                raise self._explain(error) from error
            if not (isinstance(error, TuttiError) and error.agreed):
                self._tell_failure(error)
            raise

    def close(self) -> None:
        """End the threads; the signals mean again what they did before."""
        if self._closed:
            return
        self._closed = True
        if threading.get_ident() == self._main and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before[0])
            for number, handler in self._before[1].items():
                signal.signal(number, handler)
        self._mail.close()
        with suppress(OSError):
            os.write(self._wake, b"\0")
        for thread in self._threads:
            thread.join(5)
        for handle in (self._wake, self._signals, self._screen):
            os.close(handle)

    # Stopping.

    def _take_signals(self) -> None:
        """Signals wake the watch at once, even while the main thread waits inside a library."""
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._before: tuple[int, dict[signal.Signals, Any]] = (-1, {})
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.signal(number, _heed) for number in _SIGNALS}
            self._before = (signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False), handlers)

    def _tick(self) -> None:
        patience = 0.0  # the first look is at once: a short run may begin when no time is left
        while True:
            ready, _, _ = select.select([self._signals], [], [], patience)
            patience = self._interval
            numbers = os.read(self._signals, 64) if ready else b""
            if self._closed:
                return
            with suppress(RuntimeError):  # the store is gone: the main thread will find out
                for number in numbers:
                    if number in _SIGNALS:
                        self._ask_to_stop(f"on {signal.Signals(number).name}")
                if self._ends is not None and self._time_is_short(self._ends - time.time()):
                    self._ask_to_stop("before the end of the allocation")
                if self._waits_too_long():
                    self._give_up()

    def _time_is_short(self, seconds_left: float) -> bool:
        """Whether there is just enough time for the step under way and a checkpoint."""
        mark = self._mark
        step_seconds = time.monotonic() - mark[2] if mark else 0.0
        return seconds_left < self._margin + 1.5 * self.save_seconds + step_seconds

    def _ask_to_stop(self, reason: str) -> None:
        if self.stop_reason is None:
            self._mail.send_all("stop", reason)
            self._ends = None

    # Notes from other watches.

    def _listen(self) -> None:
        with suppress(RuntimeError):
            while True:
                kind, *content = self._mail.receive()
                if kind == "over":
                    return
                getattr(self, f"_on_{kind}")(*content)

    def _on_stop(self, reason: str) -> None:
        """Begin no further step until all have said which one they have begun."""
        with self._lock:
            if self.stop_reason is not None:
                return
            self.stop_reason = reason
            begun = self._begun
        self._mail.send(0, "begun", self._rank, begun)

    def _on_begun(self, rank: int, step: int) -> None:
        self._begun_by[rank] = step
        if len(self._begun_by) == len(self._hosts):
            self._mail.send_all("last", max(self._begun_by.values()))

    def _on_last(self, step: int) -> None:
        self._last = step
        self._decided.set()

    def _on_where(self, asker: int) -> None:
        self._mail.send(asker, "here", self._whereabouts())

    def _on_here(self, answer: Whereabouts) -> None:
        with self._answered:
            self._answers[answer.rank] = answer
            self._answered.notify()

    def _on_failed(self, rank: int, text: str, exit_code: int) -> None:
        if rank != self._rank and self._failed is None:
            self._failed = (rank, text, exit_code)
            self._word.set()
            self._decided.set()  # there is nothing left to agree on

    def _on_verdict(self, text: str, exit_code: int, reporter: int) -> None:
        """The job is over; a main thread that is stuck cannot end this rank, so that it is ended here."""
        self._verdict = (text, exit_code)
        self._spoken.set()
        if not self._explains:
            end_rank(self._rank, text, exit_code, self._screen if reporter == self._rank else None)

    # Waits that do not end.

    def _waits_too_long(self) -> bool:
        mark = self._mark
        return mark is not None and time.monotonic() - mark[2] > self._deadline

    def _give_up(self) -> None:
        """Find out who is missing, and end this rank; whichever rank is first does it for all."""
        mark = self._mark
        if mark is None or self._explains:
            return
        if self._mail.is_first_to("report"):
            self._conclude(f"step {mark[1]:,} did not end within {self._deadline:g} s", _ANSWER_SECONDS, stuck=True)
        self._spoken.wait(_VERDICT_SECONDS)  # the listener ends this rank

    def _explain(self, error: Exception) -> TuttiError:
        """What is known of a failure that another rank has caused."""
        self._explains = True
        if self._word.wait(_WORD_SECONDS) and self._failed:
            return self._known_failure(*self._failed)
        step = f"step {self._mark[1]:,}" if self._mark else "the start of the run"
        if isinstance(error, DeadlineError) or "timed out" in str(error).lower():
            return self._report(f"{step} did not end within {self._deadline:g} s", _ANSWER_SECONDS)
        return self._report(f"the connection to another rank was lost in {step}", _QUICK_ANSWER_SECONDS)

    def _known_failure(self, rank: int, text: str, exit_code: int) -> TuttiError:
        known = TrainingError(f"rank {rank} on host {self._hosts[rank]} failed: {text}")
        known.exit_code, known.told = exit_code, True
        return known

    def _report(self, what: str, answer_seconds: float) -> TuttiError:
        """The common verdict of all ranks, as an error of this one."""
        self._explains = True
        try:
            first = self._mail.is_first_to("report")
            if first:
                self._conclude(what, answer_seconds)
            self._spoken.wait(_VERDICT_SECONDS)
        except RuntimeError:
            return RankLost(f"{what}: rank 0 on host {self._hosts[0]}, which holds the store, is gone or out of reach.")
        if self._verdict is None:
            return RankLost(f"{what}: no rank could find out who is missing.")
        text, exit_code = self._verdict
        error = RankLost(text) if exit_code == RankLost.exit_code else DeadlineError(text)
        error.told = not first
        return error

    def _conclude(self, what: str, answer_seconds: float, stuck: bool = False) -> None:
        """Ask all ranks where they are, write down what follows, and tell everybody."""
        with self._answered:
            self._mail.send_all("where", self._rank)
            self._answered.wait_for(lambda: len(self._answers) == len(self._hosts), answer_seconds)
            answers = list(self._answers.values())
        finding = find_missing(answers, self._hosts, what)
        exit_code = RankLost.exit_code if finding.silent else DeadlineError.exit_code
        self._write_down(finding, answers, stuck)
        self._mail.send_all("verdict", finding.text, exit_code, self._rank)

    def _write_down(self, finding: Finding, answers: Sequence[Whereabouts], stuck: bool) -> None:
        if self.folder is None:
            return
        content = asdict(finding) | {"ranks": [asdict(answer) for answer in answers], "time": time.time()}
        with suppress(OSError):
            write_durably(self.folder.logs / "hang.json", json.dumps(content, indent=2) + "\n")
            if stuck:  # no main thread will do it
                from tutti.records.record import Record

                Record.open(self.folder.record).end("failed", failure=finding.text.split("\n")[0])

    def _tell_failure(self, error: Exception) -> None:
        """Spare the others the search for a rank that knows itself why it ends."""
        text = str(error) if isinstance(error, TuttiError) else f"{type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, TuttiError) else 1
        with suppress(RuntimeError):
            self._mail.send_all("failed", self._rank, text.split("\n")[0], code)

    def _whereabouts(self) -> Whereabouts:
        phase, step, since = self._mark or (Phase.BATCH, 0, time.monotonic())
        seconds = time.monotonic() - since
        return Whereabouts(self._rank, platform.node(), phase, step, seconds, stack_of(self._main))


def stack_of(thread: int) -> tuple[str, ...]:
    """The Python calls of a thread as lines, the innermost last."""
    frame: FrameType | None = sys._current_frames().get(thread)
    calls = [call for call in traceback.extract_stack(frame) if call.name not in _OF_TORCH] if frame else []
    return tuple(
        f"{Path(call.filename).name}:{call.lineno} in {call.name}: {call.line or ''}" for call in calls[-_DEEPEST:]
    )


def _heed(*_: object) -> None:
    """The watch has read the signal from its pipe."""
