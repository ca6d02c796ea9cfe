"""How well the epochs to a target at a large batch follow from those at small batches.

Goal: fitted on the batches up to an eighth of the largest, `E0 (1 + B / B_noise)` gives the epochs of the others within
15 %, and its intervals of 90 % contain them. docs/advise.md says how far that is so.

- A series is one network and one target, with runs at several global batches, as in MLPerf's submissions.
- Batches that were measured several times count as often. A range of epochs counts as its middle.
- Shares of a quarter and a half are shown beside the eighth, where they hold more batches. Without a batch there is no
  answer.
- Epochs of progress, in which some files count, are shown as they are and as epochs of samples: an epoch of progress at
  batch B has (B_simple + B) / (B_simple + B_first) epochs of samples, by the noise scale measured at B.
- The prior of a sweep was chosen with these series in view, so the table is no test of it. `--narrow` shows what
  another prior makes of them.
- "noise scale": the epochs at the smallest batch and the noise scale measured there, without any other batch.

    python benchmarks/forecast_epochs.py --epochs epochs_to_target.json
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tutti import units
from tutti.forecast.epochs import EpochsCurve, EpochsPoint, NoiseBelief, believe, fit_epochs

BAR = 0.15
SHARES = (8, 4, 2)
TITLES = ("series", "fitted on", "batches", "B_noise", "90% interval", "predicted", "mean", "worst", "in 90%", "bar")


@dataclass(frozen=True)
class Series:
    """The epochs to one target by global batch."""

    name: str
    points: tuple[EpochsPoint, ...]
    belief: NoiseBelief | None = None  # what the noise scale at the smallest batch says of the critical batch

    @property
    def largest(self) -> float:
        return max(each.global_batch for each in self.points)


def read_series(path: Path) -> list[Series]:
    """The series of a file; one in epochs of progress also as epochs of samples, and by its noise scale."""
    found = []
    for each in json.loads(path.read_text()):
        given = each["points"]
        if "epochs" in given[0]:
            found.append(Series(each["id"], tuple(_point(one, float(np.mean(one["epochs"]))) for one in given)))
            continue
        name, progress = each["id"], [float(one["epochs_of_progress"]) for one in given]
        samples = [count * _samples(one, given[0]) for count, one in zip(progress, given, strict=True)]
        found.append(Series(f"{name}, progress", tuple(map(_point, given, progress))))
        points = tuple(map(_point, given, samples))
        found.append(Series(f"{name}, samples", points))
        scale = float(given[0]["B_simple_median"])
        found.append(Series(f"{name}, noise scale", points, believe(scale, scale, scale)))
    return found


def _point(given: dict[str, Any], epochs: float) -> EpochsPoint:
    return EpochsPoint(given["batch"], epochs)


def _samples(given: dict[str, Any], first: dict[str, Any]) -> float:
    """Epochs of samples in one epoch of progress."""
    scale = given["B_simple_median"]
    return (scale + given["batch"]) / (scale + first["batch"])


def rows(series: Series, prior: NoiseBelief | None) -> Iterator[list[str]]:
    """What is predicted from the batches up to an eighth, a quarter and a half of the largest."""
    if series.belief:
        first = min(series.points, key=lambda each: each.global_batch)
        yield _row(series, "noise scale", [first], fit_epochs([first], series.belief))
        return
    before: list[EpochsPoint] | None = None
    for share in SHARES:
        fitted = [each for each in series.points if each.global_batch <= series.largest / share]
        if fitted == before:
            continue
        before, name = fitted, f"1/{share} of {series.largest:,.0f}"
        if fitted:
            yield _row(series, name, fitted, fit_epochs(fitted, prior))
        else:
            yield [series.name, name, "none", *[""] * 6, "no answer"]


def _row(series: Series, name: str, fitted: Sequence[EpochsPoint], curve: EpochsCurve) -> list[str]:
    rest = [each for each in series.points if each.global_batch > max(point.global_batch for point in fitted)]
    errors = [curve.quantile(each.global_batch, 0.5) / each.epochs - 1 for each in rest]
    inside = [
        curve.quantile(each.global_batch, 0.05) <= each.epochs <= curve.quantile(each.global_batch, 0.95)
        for each in rest
    ]
    worst = max(errors, key=abs)
    batches = sorted({each.global_batch for each in fitted})
    span = units.count(batches[0]) if len(batches) == 1 else f"{batches[0]:,.0f} to {batches[-1]:,.0f}"
    return [
        series.name,
        name,
        span,
        units.count(round(curve.noise_quantile(0.5))),
        " to ".join(units.count(round(curve.noise_quantile(end))) for end in (0.05, 0.95)),
        str(len(rest)),
        units.percent(float(np.mean(np.abs(errors)))),
        f"{worst:+.0%}",
        f"{sum(inside)} of {len(rest)}",
        "held" if abs(worst) <= BAR else "missed",
    ]


def details(series: Series, share: int, prior: NoiseBelief | None) -> Iterator[list[str]]:
    """Every predicted point."""
    fitted = [each for each in series.points if each.global_batch <= series.largest / share]
    if series.belief or not fitted:
        return
    curve = fit_epochs(fitted, prior)
    for each in series.points:
        if each.global_batch > series.largest / share:
            middle, low, high = (curve.quantile(each.global_batch, end) for end in (0.5, 0.05, 0.95))
            values = [units.number(value) for value in (each.epochs, middle, low, high)]
            batch, error = units.count(each.global_batch), f"{middle / each.epochs - 1:+.0%}"
            yield [series.name, batch, *values[:2], error, f"{values[2]} to {values[3]}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=Path, required=True, help="the file of epochs to a target by global batch")
    parser.add_argument("--narrow", action="store_true", help="with the prior of published critical batches")
    given = parser.parse_args()
    prior = NoiseBelief() if given.narrow else None
    series = read_series(given.epochs)
    units.print_table(TITLES, [row for each in series for row in rows(each, prior)], left=TITLES[:3])
    print()
    titles = ("series", "batch", "measured", "predicted", "error", "90% interval")
    units.print_table(titles, [row for each in series for row in details(each, SHARES[0], prior)])


if __name__ == "__main__":
    main()
