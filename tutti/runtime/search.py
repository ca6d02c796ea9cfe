"""The search for ranks that others wait for: all tell where they are, and one of them concludes for everybody."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from tutti.errors import DeadlineError, RankLost, TrainingError, TuttiError
from tutti.records.files import write_durably
from tutti.records.folder import RunFolder
from tutti.records.record import Record
from tutti.runtime.ending import end_rank
from tutti.runtime.mail import Mail
from tutti.runtime.whereabouts import Finding, Whereabouts, find_missing

ANSWER_SECONDS = 4.0  # how long a rank may take to say where it is
QUICK_ANSWER_SECONDS = 1.0  # where it is known that one has gone
_VERDICT_SECONDS = 20.0
_WORD_SECONDS = 0.5  # how long word of a failing rank may be under way when its connections are already closed


class Search:
    """What this rank knows and says of ranks that are missing or have failed."""

    def __init__(
        self, mail: Mail, rank: int, hosts: Sequence[str], whereabouts: Callable[[], Whereabouts], screen: int
    ) -> None:
        self.folder: RunFolder | None = None  # where a finding is written, once the run has a folder
        self.failed: tuple[int, str, int] | None = None  # another rank, what it said, its exit code
        self.explains = False  # the main thread is here, and ends this rank itself
        self._mail = mail
        self._rank = rank
        self._hosts = hosts
        self._whereabouts = whereabouts
        self._screen = screen
        self._answers: dict[int, Whereabouts] = {}
        self._answered = threading.Condition()
        self._word = threading.Event()
        self._verdict: tuple[str, int] | None = None
        self._spoken = threading.Event()

    def tell_failure(self, error: Exception) -> None:
        """Spare the others the search for a rank that knows itself why it ends."""
        text = str(error) if isinstance(error, TuttiError) else f"{type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, TuttiError) else 1
        with suppress(RuntimeError):
            self._mail.send_all("failed", self._rank, text.split("\n")[0], code)

    def wait_for_word(self) -> TuttiError | None:
        """What another rank has said of its own failure, as an error of this one."""
        self.explains = True
        return self.known_failure() if self._word.wait(_WORD_SECONDS) else None

    def known_failure(self) -> TuttiError | None:
        """The same, if it has been said."""
        if self.failed is None:
            return None
        rank, text, exit_code = self.failed
        known = TrainingError(f"rank {rank} on host {self._hosts[rank]} failed: {text}")
        known.exit_code, known.told = exit_code, True
        return known

    def report(self, what: str, answer_seconds: float) -> TuttiError:
        """The common verdict of all ranks, as an error of this one."""
        self.explains = True
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

    def end_all(self, what: str) -> None:
        """The same from another thread, since the main thread is stuck: the verdict then ends this rank."""
        if self.explains:
            return
        if self._mail.is_first_to("report"):
            self._conclude(what, ANSWER_SECONDS, stuck=True)
        self._spoken.wait(_VERDICT_SECONDS)

    def on_where(self, asker: int) -> None:
        self._mail.send(asker, "here", self._whereabouts())

    def on_here(self, answer: Whereabouts) -> None:
        with self._answered:
            self._answers[answer.rank] = answer
            self._answered.notify()

    def on_failed(self, rank: int, text: str, exit_code: int) -> None:
        if rank != self._rank and self.failed is None:
            self.failed = (rank, text, exit_code)
            self._word.set()

    def on_verdict(self, text: str, exit_code: int, reporter: int) -> None:
        self._verdict = (text, exit_code)
        self._spoken.set()
        if not self.explains:
            end_rank(self._rank, text, exit_code, self._screen if reporter == self._rank else None)

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
                Record.open(self.folder.record).end("failed", failure=finding.text.split("\n")[0])
