"""The points of a study as CSV, for other programs."""

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from tutti.study.analysis import Analysis
from tutti.study.outcome import SHARES
from tutti.study.run_figures import RunFigures


def points_csv(analysis: Analysis) -> str:
    """Every point as a line of plain numbers."""
    metrics = list(dict.fromkeys(name for run in analysis.runs for name in run.final))
    keys = list(dict.fromkeys(key for run in analysis.runs for key in run.outcome.point.values if key != "ranks"))
    titles = ["id", "state", "reason", "ranks", *keys, "repeat", "seed", "global_batch", "per_rank_batch", "windows"]
    titles += ["samples_per_second", "samples_per_second_low", "samples_per_second_high", "outlier", "outlier_windows"]
    titles += [f"{part}_share" for part in SHARES]
    titles += ["gradient_bytes", "exposed_seconds", "all_reduce_seconds"] if analysis.links else []
    titles += [f"{which}_{name}" for name in metrics for which in ("final", "best")]
    titles += ["goal_epoch", "goal_step", "goal_seconds", "collapse", "folder"]
    text = io.StringIO()
    writer = csv.DictWriter(text, titles, lineterminator="\n")
    writer.writeheader()
    for run in analysis.runs:
        writer.writerow(_csv_row(run, keys, metrics) | _csv_exchange(analysis, run))
    return text.getvalue()


def _csv_row(run: RunFigures, keys: list[str], metrics: list[str]) -> dict[str, Any]:
    point, state, plan, speed, reached = run.outcome.point, run.outcome.state, run.outcome.plan, run.speed, run.reached
    row: dict[str, Any] = {"id": run.id, "state": state.state, "reason": state.reason, "ranks": point.ranks}
    row |= {key: _plain(point.values.get(key)) for key in keys} | {"repeat": point.repeat, "seed": point.seed}
    row |= {key: plan.get(key) for key in ("global_batch", "per_rank_batch")}
    if speed:
        row |= {"windows": speed.n, "samples_per_second": speed.median}
        row |= {"samples_per_second_low": speed.low, "samples_per_second_high": speed.high}
        row |= {"outlier": run.is_outlier, "outlier_windows": len(run.outlier_windows)}
    row |= {f"{part}_share": share for part, share in run.shares.items()}
    row |= {f"final_{name}": run.final.get(name) for name in metrics} | {
        f"best_{name}": run.best.get(name) for name in metrics
    }
    if reached:
        row |= {"goal_epoch": reached.epoch, "goal_step": reached.step, "goal_seconds": reached.seconds}
    return row | {"collapse": run.collapse, "folder": run.outcome.folder}


def _csv_exchange(analysis: Analysis, run: RunFigures) -> dict[str, Any]:
    """The gradients of a run, its exposed seconds a step, and an all-reduce on as many ranks by measured links."""
    found = analysis.links.at(run.outcome.point.ranks) if analysis.links else None
    if found is None or not run.shares or run.speed is None:
        return {}
    exposed = run.shares["communication"] * run.outcome.plan["global_batch"] / run.speed.median
    return {
        "gradient_bytes": found.gradient_bytes,
        "exposed_seconds": exposed,
        "all_reduce_seconds": found.seconds,
    }


def _plain(value: Any) -> Any:
    """A value that is a mapping or a list as JSON, which other programs read."""
    return json.dumps(value) if isinstance(value, Mapping | list) else value
