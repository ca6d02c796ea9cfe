"""Run folders that nobody has trained in, for what reads them."""

import json
from pathlib import Path
from typing import Any

from tutti.bench.results import Measurement, write_measurements
from tutti.config.load import resolve
from tutti.runs.folder import RunFolder


def make_run(path: Path, *overrides: str, ranks: int = 2, step_seconds: float = 0.5, **content: Any) -> RunFolder:
    """Two epochs of four steps of `digits`, with phases of known shares; each epoch has a validation."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    config = resolve("digits", list(overrides)).config
    folder.config.write_text(config.as_yaml())
    segment = {"host": "node1", "hosts": ["node1"] * ranks, "versions": {"torch": "2.13.0"}, "device": "cpu"}
    record = {
        "recipe": "digits",
        "ranks": ranks,
        "started": "2026-11-15T10:00:00+01:00",
        "state": "finished",
        "segments": [segment | content.pop("segment", {})],
        "plan": {"global_batch": 64, "per_rank_batch": 64 // ranks, "peak_lr": config.optim.lr},
    }
    folder.record.write_text(json.dumps(record | content))
    folder.metrics.write_text("".join(json.dumps(event) + "\n" for event in _events(step_seconds)))
    return folder


def _events(step_seconds: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "epoch": 0, "valid_loss": 2.3, "valid_accuracy": 0.1}]
    for step in range(1, 9):
        events.append(_window(step, step_seconds * (10 if step == 1 else 1)))
        if step % 4 == 0:
            valid = {"train_loss": 2 / step, "valid_loss": 3 / step, "valid_accuracy": 0.98 - 0.01 * step}
            events.append({"event": "epoch", "step": step, "epoch": step // 4, "samples_per_second": 128.0} | valid)
            events[-1]["seconds"] = 4 * step_seconds
    return events


def _window(step: int, seconds: float) -> dict[str, Any]:
    shares = {"data": 0.1, "forward": 0.2, "backward": 0.3, "update": 0.1, "communication": 0.15, "waiting": 0.05}
    phases = {f"{name}_seconds": share * seconds for name, share in (shares | {"rest": 0.1}).items()}
    told = {"loss": 2 / step, "accuracy": 0.1 * step, "samples_per_second": 64 / seconds, "seconds": seconds}
    return {"event": "step", "step": step, "epoch": (step + 3) // 4} | told | phases


def train_run(path: Path, ranks: int, nodes: int, batch: int = 8, speed: float = 100.0, recipe: str = "own") -> Path:
    """A run of some ranks on nodes, as `make_run`, with a speed in samples per second."""
    plan = {"per_rank_batch": batch, "global_batch": ranks * batch, "gradient_bytes": 1000}
    hosts = [f"n{rank * nodes // ranks}" for rank in range(ranks)]
    make_run(path, ranks=ranks, step_seconds=64 / speed, recipe=recipe, plan=plan, segment={"hosts": hosts})
    return path


def bench_run(folder: Path, ranks: int) -> Path:
    """A run of `tutti bench` on ranks of one host: 0.11 s a step, of which 0.02 are exposed communication."""
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({"recipe": "own", "ranks": ranks}))
    times = {"whole": tuple((0.1 + 0.01 * rank, 0.2, 0.1) for rank in range(ranks))}
    parts = {"communication": ((0.03, 0.03, 0.03), (0.02, 0.02, 0.02)), "data": ((0.0,) * 3, (0.001,) * 3)}
    common = {"settings": {}, "cores": 2, "local_ranks": ranks, "device": "cpu", "device_name": "cpu", "threads": 1}
    measured = Measurement(
        "", (), ranks=ranks, hosts=("n1",) * ranks, per_rank_batch=8, global_batch=8 * ranks, parameters=250,
        gradient_bytes=1000, steps={"whole": 5}, seconds=times, parts=parts, peak_bytes=(0,) * ranks, **common,
    )  # fmt: skip
    write_measurements(folder / "bench.json", [measured], {})
    return folder
