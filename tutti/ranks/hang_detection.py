"""Hang detection and stopping: threads beside the one that trains, on every rank.

They notice a request to stop, and have all ranks agree on the step after which the run stops. They notice a wait that
does not end, and have all ranks report where they are. Ranks exchange these messages through the hub, never through
collectives, which may be what hangs.
"""

import contextlib
import json
import os
import platform
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from typing import Any

from tutti.config.schema import RuntimeConfig
from tutti.errors import (
    Cause,
    DeadlineError,
    Interrupted,
    LaunchError,
    RankLost,
    TrainingError,
    TuttiError,
    cause_of,
    summarise_error,
)
from tutti.ranks.failures import NOTES_VARIABLE, end_rank, is_consequence, name_signal
from tutti.ranks.hub import Position, allow_seconds, find_missing, stack_of
from tutti.ranks.hub_client import Handler, HubClient, StopAgreement
from tutti.ranks.placement import Environment, Placement
from tutti.runs.files import write_durably
from tutti.runs.folder import RunFolder
from tutti.runs.record import Record
from tutti.runs.step_parts import StepPart

ENDS_VARIABLE = "TUTTI_JOB_ENDS"  # seconds since the epoch; job scripts set it
_QUERY_SECONDS = 10


def allocation_end(env: Environment) -> float | None:
    """Return the end of this allocation in seconds since the epoch; None if there is none."""
    for name in (ENDS_VARIABLE, "SLURM_JOB_END_TIME"):
        if text := env.get(name):
            try:
                return float(text)
            except ValueError:
                raise LaunchError(f"{name}={text!r}: expected seconds since the epoch, as date +%s prints.") from None
    if job := env.get("SLURM_JOB_ID"):
        return _ask_slurm(job)
    return None


def _ask_slurm(job: str) -> float | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job],
            capture_output=True,
            text=True,
            check=True,
            timeout=_QUERY_SECONDS,
        )
        return end_time(answer.stdout)
    return None


def end_time(text: str) -> float | None:
    """Parse the end of a job from the output of `scontrol show job`; None for a job without a limit."""
    match = re.search(r"\bEndTime=(\S+)", text)
    with contextlib.suppress(ValueError):
        if match:
            return datetime.fromisoformat(match[1]).timestamp()
    return None


ANSWER_SECONDS = 4.0  # how long a rank may take to report its position
QUICK_ANSWER_SECONDS = 1.0  # when a rank is known to have ended
_VERDICT_SECONDS = 20.0  # for the hub to conclude from the answers
_FAILURE_SECONDS = 0.5  # how long the message of a failing rank may take when its connections are already closed


class HangSearch:
    """Finds the ranks that the others wait for, and distributes the failure of a rank to all."""

    def __init__(self, hub: HubClient, hosts: Sequence[str], position: Callable[[], Position], screen: int) -> None:
        self.folder: RunFolder | None = None  # where rank 0 writes a finding, once the run has a folder
        self.failed: dict[str, Any] | None = None  # what another rank has reported of its failure
        self.explains = False  # the main thread has returned from its wait and ends this rank itself
        self._hub = hub
        self._rank = hub.rank
        self._hosts = hosts
        self._position = position
        self._screen = screen
        self._failure_known = threading.Event()
        self._verdict: dict[str, Any] | None = None
        self._concluded = threading.Event()

    def tell_failure(self, error: Exception) -> None:
        """Send the reason of a failure of this rank to all ranks, so that they need not search for it."""
        code = error.exit_code if isinstance(error, TuttiError) else 1
        self._hub.send("failed", text=summarise_error(error), exit_code=code, cause=cause_of(error))

    def wait_for_failure(self) -> TuttiError | None:
        """Wait for the message of another rank that has failed; returns it as an error of this rank."""
        self.explains = True
        return self.known_failure() if self._failure_known.wait(_FAILURE_SECONDS) else None

    def known_failure(self) -> TuttiError | None:
        """Return the failure of another rank as an error of this rank, if one has been received."""
        if self.failed is None:
            return None
        rank, host, text = self.failed["rank"], self.failed["host"], self.failed["text"]
        who = f"rank {rank} on host {host}"
        known = TrainingError(text if text.startswith(who) else f"{who} failed: {text}")
        known.exit_code, known.told, known.rank = self.failed["exit_code"], True, rank
        known.cause = Cause(self.failed["cause"])
        return known

    def report(self, what: str, answer_seconds: float) -> TuttiError:
        """Search for the missing ranks; returns the conclusion that all ranks share as an error of this rank."""
        self.explains = True
        self._search(what, answer_seconds)
        if self._verdict is None and self._rank:  # the verdict comes from rank 0
            how = "has ended or is unreachable" if self._hub.ended else "does not answer: it is stopped, or hangs"
            lost = RankLost(f"{what}: rank 0 on host {self._hosts[0]}, which holds the hub, {how}.")
            lost.rank = 0
            return lost
        if self._verdict is None:
            return RankLost(f"{what}: no rank could find out who is missing.")
        return self._shared_error(self._verdict)

    def end_all(self, what: str) -> None:
        """Search from the monitor thread while the main thread hangs; the conclusion then ends this rank."""
        if not self.explains:
            self._search(what, ANSWER_SECONDS)
            if self._verdict is None:  # rank 0 has ended, or hangs as a whole
                lost = f"{what}, and rank 0 on host {self._hosts[0]}, which holds the hub, does not answer."
                verdict = {"text": lost, "exit_code": RankLost.exit_code, "missing": 0, "reporter": self._rank}
                self.on_verdict(verdict)

    def end_at_once(self, why: str) -> None:
        """End this rank without saving; rank 0 writes that into the record."""
        if self.folder is not None and self._rank == 0:
            Record.open(self.folder.record).end("interrupted", failure=why, cause=Cause.INTERRUPTED)
        if self._rank == 0 and NOTES_VARIABLE not in os.environ:  # otherwise the launcher tells it
            with suppress(OSError):
                os.write(self._screen, f"{why}\n".encode())
        os._exit(128 + signal.SIGINT)

    def on_where(self, _: dict[str, Any]) -> None:
        self._hub.send("here", position=self._position().plain())

    def on_failed(self, message: dict[str, Any]) -> None:
        if message["rank"] != self._rank and self.failed is None:
            self.failed = message
            self._failure_known.set()

    def on_ended(self, _: dict[str, Any]) -> None:
        """Rank 0 has ended: no verdict will come."""
        self._concluded.set()

    def on_verdict(self, message: dict[str, Any]) -> None:
        self._verdict = message
        self._concluded.set()
        if self.explains:
            return
        error = self._shared_error(message)
        if self._rank == 0 and self.folder is not None:  # the main thread hangs, and cannot write it
            with suppress(OSError):
                Record.open(self.folder.record).fail(error)
        end_rank(self._rank, error, None if error.told else self._screen)

    def conclude(self, what: str, positions: dict[int, Any]) -> dict[str, Any]:
        """Find out who is missing from the positions that ranks have sent, and write it down; on rank 0."""
        answers = [Position.from_plain(rank, self._hosts[rank], plain) for rank, plain in positions.items()]
        finding = find_missing(answers, self._hosts, what)
        if self.folder is not None:
            content = asdict(finding) | {"time": time.time()}
            content["ranks"] = [asdict(answer) | {"phase": answer.phase.order} for answer in answers]
            with suppress(OSError):
                write_durably(self.folder.logs / "hang.json", json.dumps(content, indent=2) + "\n")
        missing = min(finding.silent or finding.behind, default=None)
        exit_code = RankLost.exit_code if finding.silent else DeadlineError.exit_code
        return {"text": finding.text, "exit_code": exit_code, "missing": missing}

    def _shared_error(self, verdict: dict[str, Any]) -> TuttiError:
        kind = RankLost if verdict["exit_code"] == RankLost.exit_code else DeadlineError
        error = kind(verdict["text"])
        error.told, error.rank = verdict["reporter"] != self._rank, verdict["missing"]
        return error

    def _search(self, what: str, answer_seconds: float) -> None:
        if not self._hub.ended:
            self._hub.send("search", what=what, seconds=answer_seconds)
            self._concluded.wait(allow_seconds(answer_seconds + _VERDICT_SECONDS, self._hub.world_size))


_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_LONGEST_INTERVAL = 2.0  # seconds between two checks


class Monitor:
    """Receives the phase of the main thread, and runs the threads that check it."""

    def __init__(self, placement: Placement, hub: HubClient, hosts: Sequence[str], config: RuntimeConfig) -> None:
        self.save_seconds = 0.0  # what a checkpoint has been taking, at most
        self._rank = placement.rank
        self._deadline = config.timeout_seconds
        self._margin = config.margin_seconds
        self._interval = min(_LONGEST_INTERVAL, config.timeout_seconds / 8)
        self._ends = allocation_end(os.environ) if placement.rank == 0 else None
        self._mark: tuple[StepPart, int, float] | None = None
        self._main = threading.get_ident()
        self._screen = os.dup(2)  # the original stderr: output of a rank goes to its log while it trains
        self._hub = hub
        self._stop_agreement = StopAgreement(hub, hub.begin_run())
        self._search = HangSearch(hub, hosts, self._position, self._screen)
        self._handlers: dict[str, Handler] = {
            "stop": self._stop_agreement.on_stop,
            "last": self._stop_agreement.on_last,
            "where": self._search.on_where,
            "failed": self._on_failed,
            "verdict": self._search.on_verdict,
            "lost": self._on_lost,
            "ended": self._on_ended,
        }
        self._closed = False
        self._interrupts = 0
        self._take_signals()
        if hub.hub is not None:
            hub.hub.conclude = self._search.conclude
        for kind, handler in self._handlers.items():
            hub.on(kind, handler)
        self._thread = threading.Thread(target=self._check_main, name="monitor", daemon=True)
        self._thread.start()

    # Called by the main thread.

    def enter(self, phase: StepPart, step: int) -> None:
        """The main thread begins a phase of a step; the next call must follow before the deadline."""
        self._mark = (phase, step, time.monotonic())

    def suspend(self) -> None:
        """The main thread begins work without a deadline."""
        self._mark = None

    def write_to(self, folder: RunFolder) -> None:
        """Set the run folder in which a finding is written."""
        self._search.folder = folder

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops early; None if it does not."""
        return self._stop_agreement.reason

    def continues_after(self, step: int) -> bool:
        """Return whether a step follows this one; all ranks get the same answer."""
        answer = self._stop_agreement.continues_after(step)
        if answer is None:
            what = "ranks could not agree on a step to stop at"
            raise self._search.known_failure() or self._search.report(what, QUICK_ANSWER_SECONDS)
        return answer

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Replace the error of a broken connection or an expired deadline by its cause, as far as it is known."""
        try:
            yield
        except Interrupted:
            raise
        except Exception as error:
            if isinstance(error, DeadlineError | RankLost) or is_consequence(error):
                raise self._explain(error) from error
            if not (isinstance(error, TuttiError) and error.agreed):
                self._search.tell_failure(error)
            raise

    def close(self) -> None:
        """End the threads and restore the signal handlers."""
        if self._closed:
            return
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before[0])
            for number, handler in self._before[1].items():
                signal.signal(number, handler)
        for kind, handler in self._handlers.items():
            self._hub.off(kind, handler)
        if self._hub.hub is not None:
            self._hub.hub.conclude = None
        with suppress(OSError):
            os.write(self._wake, b"\0")
        self._thread.join(5)
        for handle in (self._wake, self._signals, self._screen):
            os.close(handle)

    def _explain(self, error: Exception) -> TuttiError:
        """Return the cause of a failure that another rank has caused."""
        if known := self._search.wait_for_failure():
            return known
        step = f"step {self._mark[1]:,}" if self._mark else "the start of the run"
        if isinstance(error, DeadlineError) or "timed out" in str(error).lower():
            return self._search.report(f"{step} did not end within {self._deadline:g} s", ANSWER_SECONDS)
        return self._search.report(f"the connection to another rank was lost in {step}", QUICK_ANSWER_SECONDS)

    # The thread that checks signals, the time limit and the main thread.

    def _take_signals(self) -> None:
        """Have signals wake the monitor thread at once, even while the main thread blocks inside a library."""
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._before: tuple[int, dict[signal.Signals, Any]] = (-1, {})
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.signal(number, _ignore_signal) for number in _SIGNALS}
            self._before = (signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False), handlers)

    def _check_main(self) -> None:
        pause = 0.0  # the first check is at once: a run may begin when no time is left
        while True:
            ready, _, _ = select.select([self._signals], [], [], pause)
            numbers = os.read(self._signals, 64) if ready else b""
            pause = self._interval
            if self._closed:
                return
            for number in numbers:
                if number in _SIGNALS:
                    self._stop_agreement.ask(f"on {name_signal(number)}")
                self._interrupts += number == signal.SIGINT
            if self._interrupts > 1:
                self._search.end_at_once("ended at once on a second SIGINT")
            if self._ends is not None and self._is_short(self._ends - time.time()):
                self._stop_agreement.ask("before the end of the allocation")
                self._ends = None
            mark = self._mark
            if mark is not None and time.monotonic() - mark[2] > self._deadline:
                self._search.end_all(f"step {mark[1]:,} did not end within {self._deadline:g} s")

    def _is_short(self, seconds_left: float) -> bool:
        """Return whether the time left is just enough for the current step and a checkpoint."""
        mark = self._mark
        step_seconds = time.monotonic() - mark[2] if mark else 0.0
        return seconds_left < self._margin + 1.5 * self.save_seconds + step_seconds

    # Messages of other ranks, in the thread that receives them.

    def _on_failed(self, message: dict[str, Any]) -> None:
        self._search.on_failed(message)
        self._stop_agreement.end_waiting()

    def _on_lost(self, message: dict[str, Any]) -> None:
        self._stop_agreement.end_waiting()

    def _on_ended(self, message: dict[str, Any]) -> None:
        self._search.on_ended(message)
        self._stop_agreement.end_waiting()

    def _position(self) -> Position:
        phase, step, since = self._mark or (StepPart.DATA, 0, time.monotonic())
        seconds = time.monotonic() - since
        return Position(self._rank, platform.node(), phase, step, seconds, stack_of(self._main))


def _ignore_signal(*_: object) -> None:
    """The monitor thread reads the signal from the pipe."""
