"""Measurements for a forecast from single runs: of `tutti train`, and of `tutti bench`."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tutti.bench.results import Measurement, read_measurements
from tutti.errors import DataError
from tutti.forecast.curve import MeasuredRun
from tutti.forecast.studies import MeasuredStudy
from tutti.runs.folder import RunFolder
from tutti.runs.metrics import read_all_events
from tutti.runs.record import read_record
from tutti.runs.step_parts import StepPart
from tutti.study.definition import Mode
from tutti.study.outcome import shares_of

BENCH = "bench.json"
WARMUP_WINDOWS = 1  # of a run of tutti train: its first log window is left out


def read_runs(paths: Sequence[Path], mode: Mode | None = None) -> MeasuredStudy:
    """Runs of one recipe on several numbers of ranks; the mode follows from their batches, unless it is given."""
    found = [_read(path) for path in paths]
    names = {name for name, _, _ in found}
    if len(names) > 1:
        raise DataError(f"runs of {', '.join(sorted(names))} are mixed: expected runs of one recipe. Leave out others.")
    runs = sorted((run for _, run, _ in found), key=lambda each: (each.ranks, each.nodes))
    mode = mode or _mode(runs)
    batch = runs[0].per_rank_batch or 0
    workload = (
        f"{names.pop()} {'per_rank' if mode == 'weak' else 'global'}={batch * (mode == 'weak' or runs[0].ranks):g}"
    )
    return MeasuredStudy(paths[0], mode, tuple(runs), next((size for *_, size in found if size), None), workload)


def _mode(runs: Sequence[MeasuredRun]) -> Mode:
    totals = {each.ranks * (each.per_rank_batch or 0) for each in runs}
    batches = {each.per_rank_batch for each in runs}
    return "strong" if len(totals) == 1 and len(batches) > 1 else "weak"


def _read(path: Path) -> tuple[str, MeasuredRun, float | None]:
    """The recipe, the measurement and the bytes of gradients of one run folder."""
    if (path / BENCH).exists():
        measured = read_measurements(path / BENCH)[0]
        return _recipe_of(path), _from_bench(measured), float(measured.gradient_bytes)
    return _from_training(RunFolder(path))


def _recipe_of(path: Path) -> str:
    record = read_record(RunFolder(path).record) or {}
    return str(record.get("recipe", path.resolve().parent.name))


def _from_bench(measured: Measurement) -> MeasuredRun:
    steps = [max(times) for times in zip(*measured.seconds["whole"], strict=True)]
    parts = {part: [median(times) for times in by_rank] for part, by_rank in measured.parts.items()}
    exposed, reading = (parts.get(part.key) for part in (StepPart.COMMUNICATION, StepPart.DATA))
    return MeasuredRun(
        measured.ranks,
        len(set(measured.hosts)),
        measured.global_batch / median(steps),
        measured.per_rank_batch,
        min(exposed) if exposed else None,
        max(reading) if reading else None,
    )


def _from_training(folder: RunFolder) -> tuple[str, MeasuredRun, float | None]:
    record = read_record(folder.record)
    if record is None:
        raise DataError(
            f"{folder.path} is no run: expected the folder of a study of tutti scale, or of runs of tutti train or "
            "tutti bench. `tutti runs` lists runs."
        )
    windows = [event for event in read_all_events(folder.metrics) if event.get("event") == "step"][WARMUP_WINDOWS:]
    plan, segments = record.get("plan") or {}, record.get("segments") or [{}]
    if not windows or not plan.get("per_rank_batch"):
        raise DataError(f"{folder.path} has no measured steps after its first log window: train it for longer.")
    run = _measured(windows, plan, segments[-1], int(record["ranks"]))
    return str(record.get("recipe")), run, plan.get("gradient_bytes")


def _measured(
    windows: Sequence[dict[str, Any]], plan: dict[str, Any], segment: dict[str, Any], ranks: int
) -> MeasuredRun:
    speed = median(event["samples_per_second"] for event in windows)
    shares = shares_of(windows)
    step = plan["global_batch"] / speed
    exposed, reading = (shares[part] * step if shares else None for part in (StepPart.COMMUNICATION, StepPart.DATA))
    return MeasuredRun(
        ranks, max(1, len(set(segment.get("hosts", ())))), speed, plan["per_rank_batch"], exposed, reading
    )
