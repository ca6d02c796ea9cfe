"""Forecasts kept with a digest of what they were made from, and set beside what was measured later."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from tutti import units
from tutti.errors import FolderError
from tutti.forecast.curve import MeasuredRun, ScalingCurve
from tutti.forecast.forecast import Forecast, Interval
from tutti.forecast.population import TABLE, Fabric
from tutti.runs.files import read_dataclass, write_dataclass

FOLDER = "forecasts"


@dataclass(frozen=True)
class KeptForecast:
    """Forecasts of one call, with all that they were made from."""

    digest: str  # of everything below but the date and the forecasts
    created: str
    mode: str
    ranks_per_node: int
    fabric: str | None
    link: str | None
    measured: tuple[MeasuredRun, ...]
    population: str  # digest of the population table
    forecasts: tuple[Forecast, ...]
    workload: str | None = None  # of a study; a table is known by the folder of its forecasts
    format: int = 1


@dataclass(frozen=True)
class CheckedForecast:
    """A forecast beside the run that exists now."""

    digest: str
    created: str
    ranks: int
    nodes: int
    forecast: float  # samples per second
    measured: float
    interval68: Interval
    interval90: Interval
    basis: str = ""
    measured_in: str = ""  # the study, or the table
    is_ahead: bool | None = None  # made before the run began; of a table it is not known
    workload: str | None = None

    @property
    def error(self) -> float:
        """Forecast over measured throughput, minus 1: positive is optimistic."""
        return self.forecast / self.measured - 1

    def is_inside(self, interval: Interval) -> bool:
        return interval[0] <= self.measured <= interval[1]


@dataclass(frozen=True)
class CheckRecord:
    """All checked forecasts together."""

    points: int
    median_error: float
    worst_error: float
    inside68: int
    inside90: int
    not_ahead: int = 0  # made after their runs had begun, and not counted

    def sentence(self) -> str:
        """The record in words."""
        return (
            f"{units.count(self.points, 'forecast')} checked: off by {units.percent(self.median_error, 1)} in the "
            f"median and {units.percent(self.worst_error, 1)} at most; {self.inside68} inside 68%, "
            f"{self.inside90} inside 90%.{self._late()}"
        )

    def _late(self) -> str:
        if not self.not_ahead:
            return ""
        were = "was made after its run had" if self.not_ahead == 1 else "were made after their runs had"
        return f" {self.not_ahead} more {were} begun, and not counted."


def keep(
    folder: Path,
    curve: ScalingCurve,
    fabric: Fabric | None,
    link: str | None,
    forecasts: Sequence[Forecast],
    workload: str | None = None,
) -> Path:
    """Write forecasts into a folder; the same forecast from the same inputs is kept once, with its first date."""
    inputs: dict[str, Any] = {
        "mode": curve.mode,
        "ranks_per_node": curve.ranks_per_node,
        "fabric": fabric.value if fabric else None,
        "link": link,
        "measured": curve.measurements,
        "population": _digest(TABLE.read_text()),
        "workload": workload,
    }
    plain = inputs | {"measured": [asdict(each) for each in curve.measurements], "ranks": [f.ranks for f in forecasts]}
    digest = _digest(json.dumps(plain, sort_keys=True))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    path = folder / FOLDER / f"{digest[:12]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_dataclass(path, KeptForecast(digest, created, forecasts=tuple(forecasts), **inputs))
    except OSError as error:
        raise FolderError(f"{path}: the forecast cannot be kept ({error.strerror}). Choose another --out.") from error
    return path


def read_created(path: Path) -> str:
    """When a kept forecast was made."""
    return read_dataclass(path, KeptForecast).created


def read_kept(folder: Path) -> list[KeptForecast]:
    """The forecasts that a folder keeps, the oldest first."""
    found = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            found.append(read_dataclass(path, KeptForecast))
        except (OSError, ValueError) as error:
            raise FolderError(f"{path} is damaged ({error}). Remove it, and check the others again.") from error
    return sorted(found, key=lambda each: each.created)


def check_forecasts(
    kept: Sequence[KeptForecast],
    measured: Sequence[MeasuredRun],
    measured_in: str = "",
    started: Mapping[tuple[int, int], str] | None = None,
) -> list[CheckedForecast]:
    """Every forecast of a run that was not measured then and is now, on as many nodes.

    `started` is when the runs began, by ranks and nodes.
    """
    now = {(each.ranks, each.nodes): each.samples_per_second for each in measured}
    found = []
    for each in kept:
        known = {(run.ranks, run.nodes) for run in each.measured}
        for made in each.forecasts:
            place = (made.ranks, made.nodes)
            if place in now and place not in known:
                found.append(
                    CheckedForecast(
                        each.digest,
                        each.created,
                        *place,
                        made.samples_per_second,
                        now[place],
                        made.interval68,
                        made.interval90,
                        made.basis,
                        measured_in,
                        _is_ahead(each.created, (started or {}).get(place)),
                        each.workload,
                    )
                )
    return found


def _is_ahead(created: str, started: str | None) -> bool | None:
    try:
        return datetime.fromisoformat(created) < datetime.fromisoformat(started) if started else None
    except (ValueError, TypeError):  # a date of another form, or without its zone
        return None


def find_open(kept: Sequence[KeptForecast], checked: Sequence[CheckedForecast]) -> list[tuple[KeptForecast, Forecast]]:
    """The forecasts of which no run exists yet."""
    done = {(each.digest, each.ranks, each.nodes) for each in checked}
    return [
        (each, made)
        for each in kept
        for made in each.forecasts
        if (each.digest, made.ranks, made.nodes) not in done
        and (made.ranks, made.nodes) not in {(run.ranks, run.nodes) for run in each.measured}
    ]


def summarise_checks(checked: Sequence[CheckedForecast]) -> CheckRecord | None:
    """The record over all checked forecasts that were not made after their run had begun; None where there is none."""
    late = sum(each.is_ahead is False for each in checked)
    checked = [each for each in checked if each.is_ahead is not False]
    if not checked:
        return None
    errors = np.abs([each.error for each in checked])
    inside68 = sum(each.is_inside(each.interval68) for each in checked)
    inside90 = sum(each.is_inside(each.interval90) for each in checked)
    return CheckRecord(len(checked), float(np.median(errors)), float(errors.max()), inside68, inside90, late)


def describe_record(checked: Sequence[CheckedForecast]) -> str:
    """The record over all checked forecasts in words, or why there is none."""
    if record := summarise_checks(checked):
        return record.sentence()
    if checked:
        return "All of these forecasts were made after their runs had begun: none of them is counted."
    return "No run was measured that a kept forecast was made for."


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
