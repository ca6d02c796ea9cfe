"""The events of a run while it trains: written to metrics.jsonl and the loggers, shown on the screen."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from tutti import units
from tutti.errors import summarise_error
from tutti.runs import summary
from tutti.runs.folder import RunFolder
from tutti.runs.loggers import Logger, LoggerError, open_logger
from tutti.runs.metrics import NOISE, LineLog, trim_events
from tutti.runs.output import Tee

_WIDE = 80  # characters of a terminal wide enough for the bar beside the numbers of a step


def _columns(width: int) -> list[ProgressColumn]:
    """The parts of the progress line; on a narrow terminal one text, of which the end is cut off."""
    epoch, steps, numbers = (
        "[bold]epoch {task.fields[epoch]}/{task.fields[epochs]}[/]",
        "{task.completed:,.0f}/{task.total:,.0f}",
        "{task.fields[numbers]}",
    )
    if width < _WIDE:
        return [TextColumn(f"{epoch} {steps} {numbers}")]
    return [TextColumn(epoch), BarColumn(16), TextColumn(steps), TextColumn(numbers), TimeRemainingColumn(compact=True)]


class Screen:
    """Shows the events of a run as they come; the log gets the plain lines in any case."""

    def __init__(self, total_steps: int, epochs: int, ranks: int, first_step: int = 0, live: bool = True) -> None:
        self._total_steps = total_steps
        self._epochs = epochs
        self._ranks = ranks
        self._bar: Progress | None = None
        stream = sys.stdout
        terminal = stream.screen if isinstance(stream, Tee) else stream
        self._log = stream.log if isinstance(stream, Tee) else None
        if live and terminal is not None and terminal.isatty():
            console = Console(file=terminal)
            self._bar = Progress(*_columns(console.width), console=console)
            fields = {"epoch": 0, "epochs": epochs, "numbers": ""}
            self._task = self._bar.add_task("", total=total_steps, completed=first_step, **fields)
            self._bar.start()

    def write(self, event: dict[str, Any]) -> None:
        if event["event"] == NOISE:  # the last line of the run has its average
            return
        line = self._line(event)
        if self._bar is None:
            print(line, flush=True)
            return
        self._keep(line)
        if event["event"] == "step":
            numbers = " ".join([*_results(event), f"{event['samples_per_second']:,.0f}/s"])
            self._bar.update(self._task, completed=event["step"], epoch=event["epoch"], numbers=numbers)
        else:
            self._bar.console.print(line, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """A line that is no event."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._keep(text)
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()

    def _keep(self, line: str) -> None:
        """Beside the bar, the log gets the line."""
        if self._log:
            with contextlib.suppress(OSError):
                self._log.write(line + "\n")

    def _line(self, event: dict[str, Any]) -> str:
        words = [f"epoch {event['epoch']}/{self._epochs}", f"step {event['step']:,}/{self._total_steps:,}"]
        if event["event"] != "step":
            words.insert(0, "before" if event["event"] == "start" else "  done")
        words += _results(event)
        if "lr" in event:
            words.append(f"lr {event['lr']:.2e}")
        if (rate := event.get("samples_per_second")) is not None:
            words.append(f"{rate:,.0f} samples/s ({rate / self._ranks:,.0f} per rank)")
        if "data_share" in event:
            words.append(f"data {event['data_share']:.1%}")
        if "communication_share" in event:
            words.append(f"communication {event['communication_share']:.1%}")
        if "seconds" in event and event["event"] == "epoch":
            words.append(f"{event['seconds']:.1f} s")
        return "  ".join(words)


_NOT_RESULTS = {"event", "step", "epoch", "time", "lr", "ranks", "skipped_images", "samples_per_second"}


def _results(event: dict[str, Any]) -> list[str]:
    """The loss and the metrics of an event, each with its name."""
    return [f"{key.replace('_', ' ')} {units.metric(key, event[key])}" for key in event if _is_result(key)]


def _is_result(key: str) -> bool:
    return key not in _NOT_RESULTS and not key.endswith(("seconds", "_share"))


class Journal:
    """Rank 0's writers and the loggers in `log.to`; on other ranks there are none, and telling costs nothing.

    Loggers are opened with the first event. One that fails is left out, which is said once.
    """

    def __init__(
        self, folder: RunFolder, screen: Screen | None, to: Sequence[str] = (), commits_all: bool = False
    ) -> None:
        self._folder, self._screen = folder, screen
        self._writers: list[Any] = [LineLog(folder.metrics), screen] if screen else []
        self._to = list(to) if screen else []
        self._loggers: dict[str, Logger] = {}
        self._shows = "tensorboard" in self._to
        self._collected: summary.Collected | None = None
        self._warned: set[str] = set()
        self._commits_all = commits_all  # of a run without checkpoints, which is never resumed

    def write(self, event: str, **values: Any) -> None:
        """Tell an event: `start` before the first step, `step` every log window, `epoch` after validation, `noise`."""
        line = {"event": event, **values, "time": time.time()}
        self._open_loggers()
        for writer in self._writers:
            writer.write(line)
        for name in list(self._loggers):
            self._try(name, lambda name: self._loggers[name].write(line))
        if event != NOISE:  # which is of an earlier step
            self._write_summaries(line["step"])
        if self._commits_all:
            self.commit()

    def collect(self, wanted: bool, begin: str = "", end: str = "") -> None:
        """Have the next event bring the summaries that are made until then; `begin` and `end` are added to names."""
        into = self._collected
        if wanted and self._shows:
            into = into or summary.Collected()
            into.begin, into.end = begin, end
            self._collected = into
        summary.collect(into if wanted else None)

    def _write_summaries(self, step: int) -> None:
        into, self._collected = self._collected, None
        summary.collect(None)
        if into is None:
            return
        for name, problem in into.problems.items():
            if name not in self._warned:
                self._warned.add(name)
                self.say(f"warning: tutti.summary: {problem}. It is left out.")
        if into.values and (logger := self._loggers.get("tensorboard")) is not None:
            self._try("tensorboard", lambda _: logger.show(step, into.values))  # pyright: ignore[reportAttributeAccessIssue]

    def commit(self) -> None:
        """Tell loggers that a checkpoint holds all events so far, which a resumed run will not repeat."""
        for name in list(self._loggers):
            self._try(name, lambda name: self._loggers[name].commit())

    def say(self, text: str) -> None:
        """A line for people."""
        if self._screen:
            self._screen.say(text)

    def close(self, ended: str = "finished") -> None:
        summary.collect(None)
        for name in list(self._loggers):
            self._try(name, lambda name: self._loggers[name].close(ended))
        for writer in self._writers:
            writer.close()

    def _open_loggers(self) -> None:
        names, self._to = self._to, []
        for name in names:
            self._try(name, lambda name: self._loggers.update({name: open_logger(name, self._folder)}))

    def _try(self, name: str, call: Callable[[str], list[str] | None]) -> None:
        """Have a logger do something, and say what it has to say; leave it out where it fails."""
        try:
            for line in call(name) or ():
                self.say(line)
        except Exception as error:
            self._loggers.pop(name, None)
            reason = str(error) if isinstance(error, LoggerError) else summarise_error(error)
            self.say(f"warning: log.to: {name} has failed: {reason.rstrip('.')}. The run continues without it.")


def rewind(folder: RunFolder, step: int, unvalidated: bool = False) -> None:
    """Remove the events after the step from which a run resumes; also its epoch, where that is validated again."""
    for path in (folder.metrics, *_ledgers(folder)):
        trim_events(path, step, "epoch" if unvalidated else None)


def _ledgers(folder: RunFolder) -> list[Path]:
    return sorted(folder.logs.glob("ledger-*.jsonl"))
