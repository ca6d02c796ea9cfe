"""What ranks do in the tests of recipes in Keras and TensorFlow: many runs after each other, since a start is slow."""

import contextlib
import io
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from waiting import wait_until

# With all that draws or differs by rank: dropout, batch norm, shifted images; and without any of it.
LIVELY: dict[str, Any] = {
    "data": {"name": "digits", "shift": 1, "shuffle": "keyed"},
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
CUT_AT = 11  # in the middle of the first epoch of 22 steps, and inside a log window


def train(name: str, out: Path, resume: Path | None = None, **values: Any) -> dict[str, Any]:
    """One run as this rank: its folder, its results and its weights."""
    from tutti.config.load import resolve_values
    from tutti.frameworks.run import KerasFramework
    from tutti.ranks.environments import discover
    from tutti.train.run import run_rank

    config = resolve_values(COMMON | {"recipe": name, "out": str(out)} | values)
    done = run_rank(KerasFramework(), config, discover(os.environ), resume=resume)
    weights = [np.array(value) for value in done.model.get_weights()]
    return {"folder": done.folder.path, "results": done.results, "weights": weights}


def cut(folder: Path, copy: Path, step: int = CUT_AT) -> Path:
    """A checkpoint in the middle of a copy of a run."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        shutil.copytree(folder, copy)
    return copy / "checkpoints" / f"step-{step:06d}"


def stopped(name: str, out: Path, framework: str) -> dict[str, Any]:
    """A run that a signal to rank 1 stops in mid-epoch, and that goes on."""
    from tutti.errors import Interrupted
    from tutti.train.job import Job

    end_step = Job.end_step

    def end_step_and_stop(self: Job, loss: Any) -> None:
        end_step(self, loss)
        if self.step == 9 and self.group.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.step >= 9:  # a run of this size would be over before the ranks know of the signal
            wait_until(lambda: self.monitor.stop_reason, lambda: "the ranks do not know of the signal")

    Job.end_step = end_step_and_stop
    try:
        train(name, out, framework=framework, **PLAIN)
        raise AssertionError("the run was not stopped")
    except Interrupted as interrupted:
        text = str(interrupted)
    finally:
        Job.end_step = end_step
    [folder] = (out / name).iterdir()
    latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    return train(name, out, latest, framework=framework, **PLAIN) | {"text": text, "step": int(latest.name[5:])}


def reached(out: Path, framework: str) -> dict[str, Any]:
    """A run that stops at a target, and is resumed there."""
    name, values = f"{framework}_target", PLAIN | {"epochs": 30, "stop_at": {"valid_accuracy": 0.85}}
    found = train(name, out, framework=framework, **values)
    folder = found["folder"]
    latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    told = (folder / "metrics.jsonl").read_text()
    resumed = train(name, out, latest, framework=framework, **values)
    return found | {"step": int(latest.name[5:]), "told": told, "resumed": resumed["weights"]}


def impatient(out: Path, framework: str) -> dict[str, Any]:
    """A run that ends after an epoch without an improvement, and that is resumed in that epoch."""
    wish = {"metric": "valid_accuracy", "patience": 1, "min_change": 1.0}
    name, values = f"{framework}_patience", PLAIN | {"epochs": 30, "stop_early": wish}
    whole = train(name, out, framework=framework, **values)
    resumed = train(
        name, out, cut(whole["folder"], out / f"{framework}_patience_cut", 33), framework=framework, **values
    )
    return whole | {"resumed": resumed["folder"]}


def on_two_ranks(out: Path) -> dict[str, Any]:
    """Runs by `fit` and by the tape: whole, and gone on from the middle."""
    found: dict[str, Any] = {}
    measured: dict[str, Any] = {"log": COMMON["log"] | {"noise_scale": True}}
    for framework in ("keras", "tensorflow"):
        values = LIVELY | measured | {"framework": framework}
        lively = train(f"{framework}_lively", out, **values)
        copy = out / f"{framework}_lively_cut"
        resumed = train(f"{framework}_lively", out, cut(lively["folder"], copy), **values)
        plain = train(f"{framework}_plain", out, framework=framework, **PLAIN | measured)
        found |= {f"{framework}_lively": lively, f"{framework}_resumed": resumed, f"{framework}_plain": plain}
        found[f"{framework}_stopped"] = stopped(f"{framework}_stopped", out, framework)
        found[f"{framework}_target"] = reached(out, framework)
        found[f"{framework}_patience"] = impatient(out, framework)
    short = {"epochs": 1, "precision": "fp16", "checkpoint": {"every_epochs": None}} | measured
    return found | {"keras_fp16": train("keras_fp16", out, framework="keras", **PLAIN | short)}


def on_one_rank(out: Path, folder: Path, lively: Path) -> dict[str, Any]:
    """The same without others, a run of two ranks gone on alone, and what needs no ranks at all."""
    from frameworks_parts import checks

    found: dict[str, Any] = {}
    for framework in ("keras", "tensorflow"):
        found[f"{framework}_plain"] = train(f"{framework}_plain", out, framework=framework, **PLAIN)
        own = {"optim": {"name": "keras.optimizers:RMSprop", "lr": 1e-2, "rho": 0.8, "clip_norm": 1.0}}
        found[f"{framework}_short"] = train(
            f"{framework}_short", out, framework=framework, **PLAIN | own | {"epochs": 3, "max_steps": 30}
        )
    copy = out / "fewer_ranks"
    found["fewer_ranks"] = train("keras_plain", out, cut(folder, copy, step=33), framework="keras", **PLAIN)
    logged = {"log": COMMON["log"] | {"profile": [3, 4]}, "epochs": 1, "precision": "bf16"}
    found["profiled"] = train("profiled", out, framework="tensorflow", **PLAIN | logged)
    found["bad_rate"] = _refusal(out)
    _, found["wrong_optimizer"] = _refusal(out, {"optim": {"name": "collections:OrderedDict", "lr": 1.0}})
    unknown = {"name": "keras.optimizers:RMSprop", "lr": 1.0, "rhoo": 0.8}
    _, found["wrong_option"] = _refusal(out, {"optim": unknown})
    found["after"] = used_afterwards(found["keras_plain"]["folder"], out)
    found["applied"] = applied(lively, out)
    return found | checks()


def used_afterwards(folder: Path, out: Path) -> dict[str, Any]:
    """A run that is evaluated, exported, loaded again, and begun with."""
    import keras
    from after_work import evaluate

    from tutti.after.run import export, open_run

    run = open_run(folder)
    for kind in ("keras", "weights.h5"):
        export(run, kind, out / f"model.{kind}", "last", force=False)
    loaded = keras.models.load_model(out / "model.keras", compile=False)
    exported = [np.array(value) for value in loaded.get_weights()]
    loaded.set_weights([np.zeros_like(value) for value in exported])
    loaded.load_weights(out / "model.weights.h5")
    init = {"from": str(folder), "checkpoint": "last"}
    begun = train("begun", out, framework="keras", **PLAIN | {"init": init, "epochs": 1})
    return {
        "evaluated": evaluate(folder, "valid", "last", in_keras=True),
        "exported": exported,
        "weights": [np.array(value) for value in loaded.get_weights()],
        "begun": begun["folder"],
    }


def applied(folder: Path, out: Path) -> dict[str, Any]:
    """What `tutti apply` writes for bytes, numbers and images, and how it ends for inputs of a wrong size."""
    import torch
    from PIL import Image

    from tutti.after.run import open_run
    from tutti.data.builtin import digits

    data = digits("valid")
    inputs, _ = data.batch(torch.arange(70), None)
    raw = data._inputs[:70].numpy()
    np.save(out / "raw.npy", raw)
    np.save(out / "floats.npy", inputs.numpy())
    np.save(out / "large.npy", np.zeros((2, 1, 9, 9), np.float32))
    (out / "images").mkdir()
    for number in range(3):
        Image.fromarray(raw[number, 0]).save(out / "images" / f"{number}.png")
    jobs = {"raw": "raw.npy", "floats": "floats.npy", "images": "images", "large": "large.npy"}
    ends = {
        name: _call(
            "apply", str(folder), str(out / given), "--checkpoint", "last", "--out", str(out / f"{name}_out.npy")
        )
        for name, given in jobs.items()
    }
    model = open_run(folder).model("last")
    expected = np.array(model(inputs.movedim(1, -1).numpy(), training=False))
    written = {name: np.load(out / f"{name}_out.npy") for name in jobs if (out / f"{name}_out.npy").exists()}
    return {"ends": ends, "expected": expected, "written": written}


def _call(*words: str) -> tuple[int, str]:
    """A command of tutti in this process: its exit code and what it says."""
    from tutti.cli.main import main

    said, argv = io.StringIO(), sys.argv
    sys.argv = ["tutti", *words]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except SystemExit as end:
        return int(end.code or 0), said.getvalue()
    finally:
        sys.argv = argv
    raise AssertionError("the command does not end")


def _refusal(out: Path, values: dict[str, Any] | None = None) -> tuple[str, str]:
    """How a run ends with such values: by default one whose loss is no number."""
    values = values or {"optim": {"name": "sgd", "lr": 1e30}, "schedule": {}}
    try:
        train("bad_rate", out, framework="keras", **PLAIN | values)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")
