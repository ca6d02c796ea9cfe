"""record.json: what ran, where, with which versions, and what came out."""

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tutti import units
from tutti.errors import Cause, FolderError, TuttiError, cause_of, summarise_error
from tutti.runs.files import read_json, write_durably
from tutti.runs.metrics import is_number, read_events
from tutti.units import is_lower_better

_PACKAGES = ("tutti-train", "torch", "numpy", "pydantic", "tensorboard", "scikit-learn")
_OF_THE_END = ("state", "ended", "ended_by", "failure", "cause", "failed_rank", "failed_host", "failed_step")
# The types of what is read again, where it is there.
_TYPES = {"failure": str, "cause": str, "failed_rank": int, "failed_host": str, "failed_step": int}
_TYPES |= {
    "recipe": str,
    "state": str,
    "kind": str,
    "started": str,
    "ranks": int,
    "plan": dict,
    "data": dict,
    "init": dict,
    "segments": list,
    "memory": dict,
}
_SEGMENT_TYPES = {"host": str, "process": int, "hosts": list, "versions": dict, "hardware": dict}
_SEGMENT_TYPES |= dict.fromkeys(("device", "launch_line", "launcher", "commit", "python_path"), str)


@dataclass
class Record:
    """The record of a run, written whole after every change."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> "Record":
        """The record in a folder, or an empty one."""
        return cls(path, read_record(path) or {})

    def start(self, **facts: Any) -> None:
        """Open a segment: the run's first start, or a resume."""
        segment = {
            "started": now(),
            "host": platform.node(),
            "process": os.getpid(),
            "versions": versions(),
            "hardware": hardware(),
            "commit": commit(),
            "python_path": os.environ.get("PYTHONPATH"),
        } | facts
        if not self.content:
            self._keep_damaged()
        self.content.setdefault("format", 1)
        self.content.setdefault("started", segment["started"])
        self.content.setdefault("segments", []).append(segment)
        self._forget_the_end()
        self.content["state"] = "running"
        self.write()

    def end(self, state: str, **facts: Any) -> None:
        """Close the segment with how it ended."""
        self.content |= {"state": state, "ended": now()} | facts
        for segment in self.content.get("segments", [])[-1:]:
            segment |= {key: self.content[key] for key in _OF_THE_END if key in self.content}
        self.write()

    def fail(self, error: BaseException, state: str = "failed", **facts: Any) -> None:
        """Close the segment with the error that ended it; rank 0 calls this."""
        self.end(state, **_failure_fields(error), **facts)

    def note_memory(self, **peaks: int) -> None:
        """Set bytes that a rank was predicted to need, or has used, at its peak; the largest rank counts."""
        if peaks:
            self.content["memory"] = (self.content.get("memory") or {}) | peaks

    def _keep_damaged(self) -> None:
        """Keep a file that could not be read under another name."""
        with contextlib.suppress(OSError):
            self.path.rename(self.path.with_name(f"{self.path.name}.damaged"))

    def _forget_the_end(self) -> None:
        """How the segment before has ended stays with that segment."""
        for key in _OF_THE_END:
            self.content.pop(key, None)

    def write(self) -> None:
        """Write it whole; a disk that is full costs the news, never the run."""
        try:
            write_durably(self.path, json.dumps(self.content, indent=2) + "\n")
        except OSError as error:
            print(f"warning: {self.path} was not written: {error.strerror}", file=sys.stderr)


PREDICTED_VARIABLE = "TUTTI_PREDICTED_PEAK"  # by what has predicted it, for rank 0: the bytes of a rank at its peak
SEGMENTS_VARIABLE = "TUTTI_SEGMENTS"  # by the launcher, for its ranks: the segments that the record had when it looked


def count_segments(path: Path) -> int:
    """The number of times that ranks have trained in the folder of a record."""
    return len((read_record(path) or {}).get("segments") or ())


def check_segments(path: Path, expected: int) -> None:
    """Refuse to train where others have since the checkpoint was chosen; this process must own the folder."""
    if (found := count_segments(path)) != expected:
        raise FolderError(
            f"{path.parent} was trained by other processes after its checkpoint had been looked up: expected "
            f"{expected} segments in its record, found {found}. Start again with: tutti train {path.parent}"
        )


def read_record(path: Path) -> dict[str, Any] | None:
    """A record's content, or None where there is no readable one; a damaged one is told once."""
    try:
        content = read_json(path)
        _check(content)
    except OSError:
        return None
    except ValueError as error:
        _warn(path, str(error))
        return None
    if "failure" in content and "cause" not in content:
        content["cause"] = _derive_cause(content["failure"])
    return content


def describe_failure(content: dict[str, Any]) -> str:
    """Why a run failed, in one line, with the rank and host of an error that was not foreseen."""
    if "failed_host" in content:
        return f"rank {content.get('failed_rank')} on host {content['failed_host']} failed: {content['failure']}"
    return content["failure"]


def _failure_fields(error: BaseException) -> dict[str, Any]:
    """The fields that tell why a run ended: failure, cause, and rank, host and step where known."""
    found: dict[str, Any] = {"failure": summarise_error(error), "cause": cause_of(error)}
    if isinstance(error, TuttiError):
        found |= {"failed_rank": error.rank, "failed_step": error.step}
    elif isinstance(error, Exception):  # of this process, which is rank 0
        found |= {"failed_rank": 0, "failed_host": platform.node()}
    return {key: value for key, value in found.items() if value is not None}


# The texts of `failure` in records without the field `cause`, which older versions of tutti have written.
_OLD_FAILURES = {
    "the loss is nan": Cause.DIVERGED,
    "the loss is inf": Cause.DIVERGED,
    "the loss is -inf": Cause.DIVERGED,
    "OutOfMemoryError": Cause.OUT_OF_MEMORY,
    "DefaultCPUAllocator": Cause.OUT_OF_MEMORY,
    "RankLost": Cause.RANK_LOST,
    "DeadlineError": Cause.TIMEOUT,
    "Interrupted": Cause.INTERRUPTED,
    "KeyboardInterrupt": Cause.INTERRUPTED,
}


def _derive_cause(failure: str) -> Cause:
    """The cause of a failure in a record that has only its text; nothing else reads a cause from text."""
    return next((cause for text, cause in _OLD_FAILURES.items() if text in failure), Cause.ERROR)


def _check(content: Any) -> None:
    """Refuse content in which something that is read again has another type."""
    _check_types(content, _TYPES, "")
    for name, value in (content.get("plan") or {}).items():
        if not (value is None or is_number(value)):
            raise ValueError(f"plan.{name} is {value!r:.40}")
    for name, value in (content.get("memory") or {}).items():
        if not is_number(value):
            raise ValueError(f"memory.{name} is {value!r:.40}")
    for number, segment in enumerate(content.get("segments") or []):
        _check_types(segment, _SEGMENT_TYPES, f"segments.{number}.")
        if not all(isinstance(host, str) for host in segment.get("hosts") or ()):
            raise ValueError(f"segments.{number}.hosts is {segment['hosts']!r:.40}")


def _check_types(content: Any, types: dict[str, type], before: str) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{before or 'it '}is no JSON object: {content!r:.40}")
    for name, kind in types.items():
        value = content.get(name)
        if value is not None and (type(value) is not kind or (kind is int and not is_number(value))):
            raise ValueError(f"{before}{name} is {value!r:.40}")


@functools.cache
def _warn(path: Path, reason: str) -> None:
    print(f"warning: {path} is damaged and left out: {reason}", file=sys.stderr)


def state_of(content: dict[str, Any]) -> str:
    """Return the state of a run; a run recorded as running whose process has ended is "interrupted"."""
    segment = (content.get("segments") or [{}])[-1]
    if content.get("state") == "running" and segment.get("host") == platform.node():
        try:
            os.kill(segment["process"], 0)
        except (ProcessLookupError, KeyError, TypeError, OverflowError):
            return "interrupted"
        except PermissionError:
            pass
    return content.get("state") or "unknown"


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def is_after(moment: str | None, start: str) -> bool:
    """Whether a time of a record is not before another."""
    try:
        return datetime.fromisoformat(moment or "") >= datetime.fromisoformat(start)
    except (ValueError, TypeError):
        return False


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that matter to a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """The processor and memory of this host."""
    return {
        "processor": _first_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(int((_first_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20, 1),
        "system": platform.platform(),
    }


def commit() -> str | None:
    """The git commit of the working directory, marked when files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return None


def _first_field(path: str, name: str) -> str | None:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return None


_KEPT = ("epoch", "ranks", "train_loss", "samples_per_second", "seconds")


def python_path(record: Mapping[str, Any]) -> str:
    """The folders from which the last part of a run imported modules of the user's, as PYTHONPATH has them."""
    return (record.get("segments") or [{}])[-1].get("python_path") or ""


def summarise_epochs(metrics: Path, ranks: int) -> dict[str, Any]:
    """The history of a run with the number of ranks, the best value of each validation metric, the mean epoch."""
    events = [event for event in read_events(metrics) if event.get("event") == "epoch"]
    if not events:
        return {}
    history = [_entry({"ranks": ranks} | event) for event in events]
    seconds = [entry["seconds"] for entry in history if entry.get("seconds")]
    mean = round(sum(seconds) / len(seconds), 3) if seconds else None
    return {"history": history, "best": _best(history), "seconds_per_epoch": mean}


def describe_best(summary: Mapping[str, Any]) -> str:
    """The best value of each validation metric and the mean time of an epoch, for people; empty without an epoch."""
    best = ", ".join(
        f"{name.replace('_', ' ')} {units.metric(name, found['value'])} (epoch {found['epoch']})"
        for name, found in summary.get("best", {}).items()
    )
    seconds = summary.get("seconds_per_epoch")
    return f"best {best}" + (f"; {seconds:.1f} s an epoch" if seconds else "") if best else ""


def _entry(event: dict[str, Any]) -> dict[str, Any]:
    return {key: event[key] for key in event if key in _KEPT or key.startswith("valid_")}


def _best(history: list[dict[str, Any]]) -> dict[str, Any]:
    """By metric, the best value and its first epoch: the least of a loss or an error; what is no number is none."""
    found = {}
    for name in (name for name in history[-1] if name.startswith("valid_")):
        known = [entry for entry in history if name in entry and not math.isnan(entry[name])]
        if known:
            sign = 1 if is_lower_better(name) else -1
            best = min(known, key=lambda entry: sign * entry[name])
            found[name] = {"value": best[name], "epoch": best.get("epoch")}
    return found
