"""Reads a run folder, and compares several runs as rows of a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti import units
from tutti.config.recipes import read_yaml
from tutti.runs.folder import RunFolder
from tutti.runs.metrics import read_events
from tutti.runs.record import read_record, state_of, summarise_epochs
from tutti.runs.step_parts import StepPart
from tutti.study.outcome import shares_of


@dataclass(frozen=True)
class Mark:
    """Metrics after a step."""

    step: int
    seconds: float  # of training since the first step
    values: Mapping[str, float]


@dataclass(frozen=True)
class RunOutcome:
    """The content of a run folder."""

    state: str
    settings: Mapping[str, str]  # by dotted key
    conditions: Mapping[str, str]  # versions, device, hosts, commit
    plan: Mapping[str, Any]  # ranks, global_batch, per_rank_batch, peak_lr, ...
    windows: tuple[Mark, ...]  # loss and metrics of training batches
    epochs: tuple[Mark, ...]  # train_loss, valid_loss, valid_accuracy, ...
    best: Mapping[str, Mapping[str, float]]  # by metric: value and epoch
    training_seconds: float
    samples_per_second: float | None
    shares: Mapping[StepPart, float]  # of a step, after the first; empty if phases were not recorded


def read_run(folder: RunFolder) -> RunOutcome:
    """Reads a run folder, also of a run that has not ended."""
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
    """Returns the conditions of the last start that may differ between runs besides their settings."""
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
    """Leaves out the first step, which includes initialisation."""
    return [event for event in steps if event["step"] > 1]


def _speed(steps: list[dict[str, Any]]) -> float | None:
    known = [event for event in _later(steps) if event.get("samples_per_second") and event.get("seconds")]
    samples = sum(event["samples_per_second"] * event["seconds"] for event in known)
    seconds = sum(event["seconds"] for event in known)
    return samples / seconds if seconds else None


_NOT_COMPARED = ("out", "batch.global", "batch.per_rank")  # a path, and values that the plan has
_PLAN = {
    "ranks": "ranks",
    "global_batch": "global batch",
    "per_rank_batch": "batch per rank",
    "peak_lr": "peak learning rate",
    "parameters": "parameters",
}


@dataclass(frozen=True)
class ComparisonRow:
    """One quantity of all runs as text, empty if a run does not have it."""

    title: str
    texts: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.texts)) > 1


def difference_rows(runs: Sequence[RunOutcome]) -> list[ComparisonRow]:
    """Returns the rows of plan, configuration and conditions that differ between runs."""
    plan = [_row(title, runs, lambda run, key=key: _number(run.plan.get(key))) for key, title in _PLAN.items()]
    settings = [_row(key, runs, lambda run, key=key: run.settings.get(key, "")) for key in _setting_keys(runs)]
    conditions = dict.fromkeys(key for run in runs for key in run.conditions)
    others = [_row(key, runs, lambda run, key=key: run.conditions.get(key, "")) for key in conditions]
    return [row for row in (*plan, *settings, *others) if row.differs]


def result_rows(runs: Sequence[RunOutcome], show_seconds: Callable[[float], str]) -> list[ComparisonRow]:
    """Returns the rows of results: final and best metrics, time, speed, and the shares of a step."""
    metrics = dict.fromkeys(name for run in runs for name in _results(run))
    rows = [
        _row("state", runs, lambda run: run.state),
        _row("epochs", runs, lambda run: _number(run.epochs[-1].values["epoch"]) if run.epochs else ""),
        _row("steps", runs, lambda run: _number(run.windows[-1].step) if run.windows else ""),
    ]
    rows += [
        _row(f"final {units.metric_title(name)}", runs, lambda run, name=name: _final(run, name)) for name in metrics
    ]
    rows += [
        _row(f"best {units.metric_title(name)}", runs, lambda run, name=name: _best(run, name)) for name in metrics
    ]
    rows += [
        _row("training time", runs, lambda run: show_seconds(run.training_seconds) if run.windows else ""),
        _row("samples/s", runs, lambda run: f"{run.samples_per_second:,.0f}" if run.samples_per_second else ""),
    ]
    shares = dict.fromkeys(share for run in runs for share in run.shares)
    rows += [_row(share, runs, lambda run, share=share: _share(run, share)) for share in shares]
    return [row for row in rows if any(row.texts)]


def _setting_keys(runs: Sequence[RunOutcome]) -> list[str]:
    """Returns all keys in the order of a configuration, grouped by section."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in _NOT_COMPARED)
    sections = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    return sorted(keys, key=lambda key: sections.index(key.partition(".")[0]))


def _row(title: str, runs: Sequence[RunOutcome], text: Callable[[RunOutcome], str]) -> ComparisonRow:
    return ComparisonRow(title, tuple(text(run) for run in runs))


def _results(run: RunOutcome) -> list[str]:
    """Returns the metrics of the last epoch, or the loss of a run without epochs."""
    if run.epochs and run.epochs[-1].step:
        return [name for name in run.epochs[-1].values if name.startswith(("train_", "valid_"))]
    return ["loss"] if run.windows else []


def _final(run: RunOutcome, name: str) -> str:
    marks = run.windows if name == "loss" else run.epochs
    value = marks[-1].values.get(name) if marks and marks[-1].step else None
    return "" if value is None else units.metric(name, value)


def _best(run: RunOutcome, name: str) -> str:
    found = run.best.get(name)
    return f"{units.metric(name, found['value'])} (epoch {found['epoch']})" if found else ""


def _share(run: RunOutcome, share: StepPart) -> str:
    return units.percent(run.shares[share], 1) if share in run.shares else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else f"{value:,}"
