"""A table of measurements, made by any framework, read and checked."""

import csv
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tutti import units
from tutti.errors import DataError, nearest
from tutti.forecast.curve import MeasuredRun, ScalingCurve, make_curve
from tutti.study.definition import Mode

COLUMNS = ("ranks", "nodes", "samples_per_second")
OPTIONAL = ("per_rank_batch", "exposed_seconds")
MOST_EFFICIENCY = 1.1  # of a rank against the fewest ranks; more is a mistake in the table
_SAME = 0.01  # relative difference of global batches that count as equal


def read_table(path: Path) -> list[MeasuredRun]:
    """The rows of a CSV file with the columns COLUMNS and, where known, OPTIONAL."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"--table {path}: cannot be read ({error}): expected a CSV file.") from error
    if not rows:
        raise DataError(f"--table {path}: there is no row: expected a line of titles and at least two measurements.")
    titles = [(title or "").strip() for title in rows[0]]
    missing = [name for name in COLUMNS if name not in titles]
    if missing:
        given = ", ".join(titles)
        raise DataError(
            f"--table {path}: the column {', '.join(missing)} is missing; given are {given}: expected "
            f"{', '.join(COLUMNS)} and, where known, {', '.join(OPTIONAL)}.{nearest(missing[0], titles)}"
        )
    return [_read_row(path, number, row) for number, row in enumerate(rows, 2)]


def check_curve(
    runs: Sequence[MeasuredRun], mode: Mode, ranks_per_node: int | None, source: str, least: int = 2
) -> ScalingCurve:
    """The curve of measurements, refused where they contradict themselves or are fewer than `least`."""
    if len(runs) < least:
        raise DataError(
            f"{source}: {units.count(len(runs), 'measurement')}: expected at least two, on different numbers of ranks. "
            "Measure one node and two."
        )
    _check_order(runs, source)
    curve = make_curve(runs, mode, ranks_per_node)
    for each in curve.measurements:
        _check_nodes(each, max(run.per_node for run in runs), source)
        _check_efficiency(curve, each, source)
    _check_batches(curve, source)
    return curve


def _read_row(path: Path, number: int, row: Mapping[str | None, str | None]) -> MeasuredRun:
    cells = {(name or "").strip(): (text or "").strip() for name, text in row.items() if isinstance(text, str | None)}
    where = f"--table {path}, line {number}"
    whole = [_number(where, name, cells.get(name, "")) for name in COLUMNS[:2]]
    for name, value in zip(COLUMNS[:2], whole, strict=True):
        if value != int(value) or value < 1:
            raise DataError(f"{where}: {name}={cells[name]}: expected a whole number of at least 1.")
    others: dict[str, float | None] = {
        name: _number(where, name, cells[name]) if cells.get(name) else None for name in OPTIONAL
    }
    speed = _number(where, "samples_per_second", cells.get("samples_per_second", ""))
    if speed <= 0:
        raise DataError(f"{where}: samples_per_second={speed:g}: expected more than 0.")
    batch, exposed = others["per_rank_batch"], others["exposed_seconds"]
    if (batch is not None and batch <= 0) or (exposed is not None and exposed < 0):
        raise DataError(f"{where}: expected per_rank_batch above 0 and exposed_seconds of at least 0.")
    return MeasuredRun(int(whole[0]), int(whole[1]), speed, batch, exposed)


def _number(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(
            f"{where}: {name}={text or '(nothing)'}: expected a number. Measure it again, or drop the line."
        )
    return value


def _check_order(runs: Sequence[MeasuredRun], source: str) -> None:
    for one, other in itertools.pairwise(runs):
        if other.ranks < one.ranks:
            raise DataError(
                f"{source}: {units.count(other.ranks, 'rank')} after {one.ranks}: expected rows in the order of ranks. "
                "Sort the table; if the order says something, give each series a table of its own."
            )
    seen: set[tuple[int, int]] = set()
    for each in runs:
        if (each.ranks, each.nodes) in seen:
            raise DataError(
                f"{source}: {_name(each)} occurs twice: expected one row each. Keep the median of repeated runs."
            )
        seen.add((each.ranks, each.nodes))


def _check_nodes(each: MeasuredRun, per_node: int, source: str) -> None:
    fits = each.ranks % each.nodes == 0 or each.nodes == math.ceil(each.ranks / per_node)
    if each.nodes > each.ranks or not fits:
        raise DataError(
            f"{source}: {_name(each)}: expected as many nodes as the ranks fill, {per_node} ranks a node at most "
            f"({units.count(math.ceil(each.ranks / per_node), 'node')}). Correct the column nodes."
        )


def _check_efficiency(curve: ScalingCurve, each: MeasuredRun, source: str) -> None:
    found = curve.efficiency(each.ranks, each.samples_per_second)
    if found > MOST_EFFICIENCY:
        raise DataError(
            f"{source}: {_name(each)} has an efficiency of {units.percent(found)} against {_name(curve.first)}: "
            f"expected at most {units.percent(MOST_EFFICIENCY)}. Check that samples_per_second is of all ranks "
            "together, and drop the first row if a rank alone is slow for reasons of its own."
        )


def _check_batches(curve: ScalingCurve, source: str) -> None:
    batches = {each.ranks: each.per_rank_batch for each in curve.measurements}
    known = [batch for batch in batches.values() if batch is not None]
    if not known:
        return
    if len(known) < len(batches):
        raise DataError(f"{source}: per_rank_batch is given for some rows alone: expected all rows, or none.")
    if curve.mode == "weak" and len(set(known)) > 1:
        given = ", ".join(f"{batch:g}" for batch in sorted(set(known)))
        raise DataError(
            f"{source}: per-rank batches of {given} are mixed: expected one for weak scaling. "
            "Give each its own table, or add --mode strong where the global batch is the same."
        )
    totals = [ranks * batch for ranks, batch in batches.items() if batch is not None]
    if curve.mode == "strong" and max(totals) > (1 + _SAME) * min(totals):
        raise DataError(
            f"{source}: global batches of {min(totals):g} to {max(totals):g}: expected one for strong scaling. Give "
            "each its own table, or add --mode weak where the per-rank batch is the same."
        )


def _name(each: MeasuredRun) -> str:
    return f"{units.count(each.ranks, 'rank')} on {units.count(each.nodes, 'node')}"
