"""The status of a submitted run: what its scheduler reports, and what the run has written."""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.errors import FolderError
from tutti.launch.cluster.schedulers import JobState, scheduler_of
from tutti.runs.folder import RunFolder
from tutti.runs.jobs import JobRecord, changed_job, find_jobs, read_job
from tutti.runs.metrics import NOISE, parse_event, read_events
from tutti.runs.record import now, read_record

_POLL_SECONDS = 0.5
_QUERY_SECONDS = 5.0  # between two queries of the scheduler
_OUTCOMES = {"complete": "complete", "again": "waiting", "failed": "failed", "stopped": "cancelled"}


@dataclass(frozen=True)
class Status:
    """The status of a submitted run."""

    folder: RunFolder
    job: JobRecord
    known: JobState | None  # None where the scheduler does not know the job any more
    step: int
    total_steps: int | None
    last_event: dict[str, Any]

    @property
    def state(self) -> str:
        """Return the state that the scheduler reports while it knows the job, then what the run has recorded."""
        if self.known and not self.known.is_over:
            return self.known.state
        last = self.job.attempts[-1] if self.job.attempts else None
        if last and last.outcome and last.outcome != "again":
            return _OUTCOMES[last.outcome]
        if self.job.cancelled or (self.known and self.known.state == "cancelled"):
            return "cancelled"
        if (read_record(self.folder.record) or {}).get("state") == "finished":
            return "complete"
        return "ended; no result was recorded" if last else "unknown to its scheduler"


def look(folder: RunFolder) -> Status:
    """Query the scheduler, and read what the run has written."""
    job = read_job(folder)
    record = read_record(folder.record) or {}
    last: dict[str, Any] = {}
    for event in read_events(folder.metrics):
        last = last if event.get("event") == NOISE else event
    total = (record.get("plan") or {}).get("total_steps")
    return Status(folder, job, _query(job), last.get("step", 0), total, last)


def choose(folder: Path | None, out: Path) -> RunFolder:
    """Return the given run folder, or that of the newest submitted run."""
    if folder is not None:
        if not folder.is_dir():
            raise FolderError(f"{folder}: no such folder. Give a run folder that `tutti submit` has printed.")
        return RunFolder(folder)
    found = find_jobs(out)
    if not found:
        raise FolderError(
            f"no submitted run in {out}. Give the path of a run folder, or name another place with --out."
        )
    return found[-1]


def cancel_job(folder: RunFolder) -> tuple[JobRecord, bool]:
    """Have the scheduler end a run, with time to save at the first call; return whether it still ran."""
    known = _query(read_job(folder))
    with changed_job(folder) as job:  # before the job ends and looks whether it was cancelled
        if (known is None or known.is_over) and not job.submitting:
            return job, False
        at_once, job.cancelled = bool(job.cancelled), now()
    if known is not None and not known.is_over:
        scheduler_of(job.scheduler).cancel(job.ids[-1], at_once)
    return job, True


def output_files(folder: RunFolder, rank: int | None) -> list[Path]:
    """Return the files with the output of a job, or of one of its ranks."""
    if rank is not None:
        return [folder.log(rank)]
    job = read_job(folder)
    return [folder.logs / f"job-{job_id}.out" for job_id in job.ids]


def logged_ranks(folder: RunFolder) -> list[int]:
    """Return the ranks that have a log of their own."""
    names = (path.stem.removeprefix("rank-") for path in folder.logs.glob("rank-*.log"))
    return sorted(int(name) for name in names if name.isdecimal())


def follow_output(folder: RunFolder, rank: int | None) -> Iterator[str]:
    """Yield the output as it is written, until the job has ended."""
    read: dict[Path, int] = {}
    queried, over = 0.0, False
    while True:
        for path in output_files(folder, rank):
            text = _read_on(path, read)
            if text:
                yield text
        if over:
            return
        if time.monotonic() - queried >= _QUERY_SECONDS:
            queried, over = time.monotonic(), _is_over(folder)
        if not over:  # otherwise once more, for the last lines
            time.sleep(_POLL_SECONDS)


def _is_over(folder: RunFolder) -> bool:
    job = read_job(folder)
    known = _query(job)
    return known is None or known.is_over


def _query(job: JobRecord) -> JobState | None:
    return scheduler_of(job.scheduler).query(job.ids[-1]) if job.ids else None


def _read_on(path: Path, read: dict[Path, int]) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(read.get(path, 0))
            content = file.read()
    except OSError:
        return ""
    read[path] = read.get(path, 0) + len(content)
    return content.decode(errors="replace")


_TAIL_BYTES = 65_536


@dataclass(frozen=True)
class Progress:
    """The newest checkpoint and metrics at one moment, to find out later whether there are newer ones."""

    folder: RunFolder
    newest: str  # the durable checkpoint
    changed: int  # when the metrics were last written

    @classmethod
    def now(cls, folder: RunFolder) -> "Progress":
        return cls(folder, _newest(folder.checkpoints / "latest"), _changed(folder.metrics))

    def has_saved(self) -> bool:
        """Return whether the run has saved a checkpoint since."""
        return _newest(self.folder.checkpoints / "latest") != self.newest

    def has_trained(self) -> bool:
        """Return whether the run has logged a step after its checkpoint; earlier steps may be repeated."""
        saved = int(match[1]) if (match := re.fullmatch(r"step-(\d{1,18})", self.newest)) else 0
        return _changed(self.folder.metrics) != self.changed and _last_step(self.folder.metrics) > saved


def _newest(pointer: Path) -> str:
    try:
        return pointer.read_text(errors="replace").strip()
    except OSError:
        return ""


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _last_step(metrics: Path) -> int:
    """Return the step of the last complete event; the last line may be half written."""
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        for line in reversed(file.read().split(b"\n")):
            if event := parse_event(line):
                return event.get("step", 0)
    return 0
