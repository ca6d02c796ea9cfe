"""metrics.jsonl: one line an event, appended as it happens, readable after a crash at any moment."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tutti.errors import FolderError
from tutti.runs.files import parse_json, write_durably

NOISE = "noise"  # the event of a step in which the gradient noise scale was measured
_WHOLE = ("step", "epoch", "ranks")
_NO_FLOATS = ("event", *_WHOLE)
_NUMBERS = ("loss", "lr", "time")
_LARGEST = 1 << 63
_SHOWN = 8  # damaged lines in a message

Event = dict[str, Any]


class LineLog:
    """Appends events as JSON lines; a disk that is full costs lines, never the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._warned = False

    def write(self, event: Event) -> None:
        try:
            self._file.write(json.dumps(event) + "\n")
        except OSError as error:
            if not self._warned:
                print(
                    f"warning: {self._path}: {error.strerror}; lines are lost until it can be written", file=sys.stderr
                )
                self._warned = True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file in order, for display: damaged lines are left out, those before the tail with a warning."""
    events = _read_lines(path)
    if damaged := _damaged_before(events, _last_good(events)):
        print(f"warning: {path}: {_name_lines(damaged)} damaged and left out", file=sys.stderr)
    return (event for event in events if event is not None)


def read_all_events(path: Path) -> list[Event]:
    """The events of a file in order, for figures: a damaged tail is left out, and other damaged lines are an error."""
    events = _read_lines(path)
    _refuse_damaged(path, events, _last_good(events))
    return [event for event in events if event is not None]


def trim_events(path: Path, last_step: int, without: str | None = None) -> None:
    """Drop what was written after a step, so that a resumed run continues the file without doubles.

    Events `without` are dropped at that step as well.

    What is damaged after the last event that stays is dropped too; what is damaged before it is an error.
    """
    if path.exists():
        events = _read_lines(path)
        kept = [event if event is not None and event.get("step", 0) <= last_step else None for event in events]
        if without:
            kept = [None if event and _is_at(event, without, last_step) else event for event in kept]
        _refuse_damaged(path, events, _last_good(kept))
        write_durably(path, "".join(json.dumps(event) + "\n" for event in kept if event is not None))


def _is_at(event: Event, kind: str, step: int) -> bool:
    return event.get("event") == kind and event.get("step") == step


def parse_event(line: bytes) -> Event | None:
    """The event of a line; None where the line is damaged."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    fits = isinstance(event, dict) and all(  # a float fits all keys but few, and most values are floats
        _fits(key, value) for key, value in event.items() if type(value) is not float or key in _NO_FLOATS
    )
    return event if fits else None


def _fits(key: str, value: Any) -> bool:
    """Whether a value is of the type that readers of its key expect."""
    if key == "event":
        return isinstance(value, str)
    if key in _WHOLE:
        return is_number(value) and isinstance(value, int) and value >= 0
    if key.endswith(("seconds", "_share", "samples_per_second")):
        return value is None or is_number(value)
    return is_number(value) if key in _NUMBERS or key.startswith(("train_", "valid_")) else True


def is_number(value: Any) -> bool:
    """Whether a value is a number that can be computed with."""
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def _read_lines(path: Path) -> list[Event | None]:
    """Every line as its event, None for those that are damaged; empty where there is no file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}. Check who may read it.") from error
    if not lines[-1]:
        lines.pop()
    return [parse_event(line) for line in lines]


def _last_good(events: Sequence[Event | None]) -> int:
    return max((place for place, event in enumerate(events) if event is not None), default=-1)


def _damaged_before(events: Sequence[Event | None], last: int) -> list[int]:
    """The numbers of damaged lines before one, counted from 1."""
    return [place + 1 for place in range(last) if events[place] is None]


def _refuse_damaged(path: Path, events: Sequence[Event | None], last: int) -> None:
    if damaged := _damaged_before(events, last):
        raise FolderError(
            f"{path}: {_name_lines(damaged)} damaged, and good lines follow: expected one JSON object in each line. "
            "Restore the file, or remove what is damaged from it."
        )


def _name_lines(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]} is"
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"lines {', '.join(map(str, numbers[:_SHOWN]))}{more} are"
