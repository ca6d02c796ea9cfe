"""What ranks do in the tests of recipes in Keras and TensorFlow: many runs after each other, since a start is slow."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

# With all that draws or differs by rank: dropout, batch norm, shifted images; and without any of it.
LIVELY: dict[str, Any] = {
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "small_cnn", "width": 4, "dropout": 0.3},
    "optim": {"name": "adamw", "lr": 5e-3, "clip_norm": 1.0},
}
PLAIN: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [16]},
    "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
    "batch": {"global": 64, "eval": 50},
}
COMMON: dict[str, Any] = {
    "batch": {"global": 64},
    "schedule": {"warmup_steps": 5, "decay": "cosine"},
    "metrics": ["accuracy", "top5"],
    "epochs": 2,
    "checkpoint": {"every_steps": 11, "keep": 9, "best": "accuracy"},
    "log": {"every_steps": 7, "ledger": True, "tensorboard": False},
    "runtime": {"device": "cpu"},
}
CUT_AT = 33  # in the middle of the second epoch of 22 steps, and inside a log window


def train(name: str, out: Path, resume: Path | None = None, **values: Any) -> dict[str, Any]:
    """One run as this rank: its folder, its results and its weights."""
    from tutti.config.load import resolve_values
    from tutti.frameworks.run import run_rank
    from tutti.runtime.discovery import discover

    config = resolve_values(COMMON | {"recipe": name, "out": str(out)} | values)
    done = run_rank(config, discover(os.environ), resume=resume)
    weights = [np.array(value) for value in done.model.get_weights()]
    return {"folder": done.folder.path, "results": done.results, "weights": weights}


def cut(folder: Path, copy: Path) -> Path:
    """A checkpoint in the middle of a copy of a run."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        shutil.copytree(folder, copy)
    return copy / "checkpoints" / f"step-{CUT_AT:06d}"


def on_two_ranks(out: Path) -> dict[str, Any]:
    """Runs by `fit` and by the tape: whole, and gone on from the middle."""
    found: dict[str, Any] = {}
    for framework in ("keras", "tensorflow"):
        lively = train(f"{framework}_lively", out, framework=framework, **LIVELY)
        copy = out / f"{framework}_lively_cut"
        resumed = train(f"{framework}_lively", out, cut(lively["folder"], copy), framework=framework, **LIVELY)
        plain = train(f"{framework}_plain", out, framework=framework, **PLAIN)
        found |= {f"{framework}_lively": lively, f"{framework}_resumed": resumed, f"{framework}_plain": plain}
    short = {"epochs": 1, "precision": "fp16", "checkpoint": {"every_epochs": None}}
    return found | {"keras_fp16": train("keras_fp16", out, framework="keras", **PLAIN | short)}


def on_one_rank(out: Path, folder: Path) -> dict[str, Any]:
    """The same without others, a run of two ranks gone on alone, and what needs no ranks at all."""
    from frameworks_parts import checks

    found: dict[str, Any] = {}
    for framework in ("keras", "tensorflow"):
        found[f"{framework}_plain"] = train(f"{framework}_plain", out, framework=framework, **PLAIN)
    copy = out / "fewer_ranks"
    found["fewer_ranks"] = train("keras_plain", out, cut(folder, copy), framework="keras", **PLAIN)
    logged = {"log": COMMON["log"] | {"profile": [3, 4]}, "epochs": 1, "precision": "bf16"}
    found["profiled"] = train("profiled", out, framework="tensorflow", **PLAIN | logged)
    found["bad_rate"] = _refusal(out)
    return found | checks()


def _refusal(out: Path) -> tuple[str, str]:
    """How a run ends whose loss is no number."""
    rate = {"optim": {"name": "sgd", "lr": 1e30}, "schedule": {}}
    try:
        train("bad_rate", out, framework="keras", **PLAIN | rate)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")
