"""What a run was and what came out of it, read from its run folder, ready to stand beside others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.config.recipes import read_yaml
from tutti.records.folder import RunFolder
from tutti.records.history import summarise_epochs
from tutti.records.metrics import read_events
from tutti.records.record import read_record, state_of
from tutti.study.outcome import shares_of


@dataclass(frozen=True)
class Mark:
    """What was told after a step."""

    step: int
    seconds: float  # of training since the first step
    values: Mapping[str, float]


@dataclass(frozen=True)
class RunOutcome:
    """One run in its run folder."""

    state: str
    settings: Mapping[str, str]  # by dotted key
    conditions: Mapping[str, str]  # versions, device, hosts, commit
    plan: Mapping[str, Any]  # ranks, global_batch, per_rank_batch, peak_lr, ...
    windows: tuple[Mark, ...]  # loss and metrics of training batches
    epochs: tuple[Mark, ...]  # train_loss, valid_loss, valid_accuracy, ...
    best: Mapping[str, Mapping[str, float]]  # by metric: value and epoch
    training_seconds: float
    samples_per_second: float | None
    shares: Mapping[str, float]  # of a step, after the first; empty where phases were not kept


def read_run(folder: RunFolder) -> RunOutcome:
    """Read a run folder; what the run has not told yet is left out."""
    record = read_record(folder.record) or {}
    events = [event for event in read_events(folder.metrics) if "step" in event]
    steps = [event for event in events if event.get("event") == "step"]
    windows, epochs, seconds = [], [], 0.0
    for event in events:
        kind = event.get("event")
        seconds += (event.get("seconds") or 0.0) if kind == "step" else 0.0
        if kind in ("step", "start", "epoch"):
            (windows if kind == "step" else epochs).append(Mark(event["step"], seconds, event))
    return RunOutcome(
        state=state_of(record),
        settings=_settings(folder),
        conditions=_conditions(record),
        plan={"ranks": record.get("ranks")} | (record.get("plan") or {}),
        windows=tuple(windows),
        epochs=tuple(epochs),
        best=summarise_epochs(folder.metrics, record.get("ranks") or 1).get("best", {}),
        training_seconds=seconds,
        samples_per_second=_speed(steps),
        shares=shares_of(_later(steps)),
    )


def _settings(folder: RunFolder) -> dict[str, str]:
    if not folder.config.is_file():
        return {}
    values = read_yaml(folder.config)
    return dict(_leaves(values)) if isinstance(values, dict) else {}


def _leaves(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{before}{key}.")
        else:
            found.append((f"{before}{key}", _shown(value)))
    return found


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _conditions(record: Mapping[str, Any]) -> dict[str, str]:
    """Of the last start, all that may make two runs differ besides their settings."""
    segment = (record.get("segments") or [{}])[-1]
    hosts = sorted(set(segment.get("hosts") or [segment.get("host") or ""]))
    hardware = segment.get("hardware") or {}
    found = {
        "host": ", ".join(hosts),
        "device": segment.get("device"),
        "processor": hardware.get("processor"),
        "cores": hardware.get("cores"),
        "threads per rank": segment.get("threads_per_rank"),
        "launcher": segment.get("launcher"),
        "commit": segment.get("commit"),
        "starts": len(record.get("segments") or []),
    }
    found |= {f"version of {name}": value for name, value in (segment.get("versions") or {}).items()}
    return {name: str(value) for name, value in found.items() if value is not None}


def _later(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the first step, in which everything is slow."""
    return [event for event in steps if event["step"] > 1]


def _speed(steps: list[dict[str, Any]]) -> float | None:
    known = [event for event in _later(steps) if event.get("samples_per_second") and event.get("seconds")]
    samples = sum(event["samples_per_second"] * event["seconds"] for event in known)
    seconds = sum(event["seconds"] for event in known)
    return samples / seconds if seconds else None
