"""Runs side by side, as rows of a table: what differs between them, and what came out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutti.records.screen import show_number
from tutti.report.runs import RunOutcome

_NOT_COMPARED = ("out", "batch.global", "batch.per_rank")  # a place, and what the plan tells
_PLAN = {
    "ranks": "ranks",
    "global_batch": "global batch",
    "per_rank_batch": "batch per rank",
    "peak_lr": "peak learning rate",
    "parameters": "parameters",
}


@dataclass(frozen=True)
class Row:
    """One thing of all runs; a text for each, empty where a run does not have it."""

    title: str
    texts: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.texts)) > 1


def difference_rows(runs: Sequence[RunOutcome]) -> list[Row]:
    """What differs in the configuration, in ranks, batch and rate, and in the conditions."""
    plan = [_row(title, runs, lambda run, key=key: _number(run.plan.get(key))) for key, title in _PLAN.items()]
    settings = [_row(key, runs, lambda run, key=key: run.settings.get(key, "")) for key in _setting_keys(runs)]
    conditions = dict.fromkeys(key for run in runs for key in run.conditions)
    others = [_row(key, runs, lambda run, key=key: run.conditions.get(key, "")) for key in conditions]
    return [row for row in (*plan, *settings, *others) if row.differs]


def result_rows(runs: Sequence[RunOutcome], show_seconds: Callable[[float], str]) -> list[Row]:
    """How runs ended: metrics at the end and at their best, time, speed, and the shares of a step."""
    metrics = dict.fromkeys(name for run in runs for name in _results(run))
    rows = [
        _row("state", runs, lambda run: run.state),
        _row("epochs", runs, lambda run: _number(run.epochs[-1].values["epoch"]) if run.epochs else ""),
        _row("steps", runs, lambda run: _number(run.windows[-1].step) if run.windows else ""),
    ]
    rows += [_row(f"final {_words(name)}", runs, lambda run, name=name: _final(run, name)) for name in metrics]
    rows += [_row(f"best {_words(name)}", runs, lambda run, name=name: _best(run, name)) for name in metrics]
    rows += [
        _row("time of training", runs, lambda run: show_seconds(run.training_seconds) if run.windows else ""),
        _row("samples/s", runs, lambda run: f"{run.samples_per_second:,.0f}" if run.samples_per_second else ""),
    ]
    shares = dict.fromkeys(share for run in runs for share in run.shares)
    rows += [_row(share, runs, lambda run, share=share: _share(run, share)) for share in shares]
    return [row for row in rows if any(row.texts)]


def _setting_keys(runs: Sequence[RunOutcome]) -> list[str]:
    """All keys in the order of a configuration, those of a section together."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in _NOT_COMPARED)
    sections = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    return sorted(keys, key=lambda key: sections.index(key.partition(".")[0]))


def _row(title: str, runs: Sequence[RunOutcome], text: Callable[[RunOutcome], str]) -> Row:
    return Row(title, tuple(text(run) for run in runs))


def _results(run: RunOutcome) -> list[str]:
    """The metrics after the last epoch; of a run without epochs the loss of its last window."""
    if run.epochs and run.epochs[-1].step:
        return [name for name in run.epochs[-1].values if name.startswith(("train_", "valid_"))]
    return ["loss"] if run.windows else []


def _final(run: RunOutcome, name: str) -> str:
    marks = run.windows if name == "loss" else run.epochs
    value = marks[-1].values.get(name) if marks and marks[-1].step else None
    return "" if value is None else show_number(name, value)


def _best(run: RunOutcome, name: str) -> str:
    found = run.best.get(name)
    return f"{show_number(name, found['value'])} (epoch {found['epoch']})" if found else ""


def _share(run: RunOutcome, share: str) -> str:
    return f"{run.shares[share]:.1%}" if share in run.shares else ""


def _words(name: str) -> str:
    return name.replace("train_", "training ").replace("valid_", "validation ").replace("_", " ")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else f"{value:,}"
