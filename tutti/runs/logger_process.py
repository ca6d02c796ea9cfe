"""A process that passes the events of a run on: `python -m tutti.runs.logger_process wandb|mlflow FOLDER SIZE`.

SIZE is that of metrics.jsonl where the run starts or resumes. Standard input has one JSON message a line: sizes up to
which events are to be passed on, and at last how the run has ended. Standard output has the answers.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import yaml

from tutti.errors import summarise_error
from tutti.runs.files import read_json, write_durably
from tutti.runs.folder import RunFolder
from tutti.runs.metrics import Event, is_number, parse_event

_END_SECONDS = 60  # within which this process ends after its run, whatever hangs in it
_NO_METRICS = ("event", "step", "epoch", "time", "ranks", "batch")
_MOST_PARAMETERS, _MOST_METRICS = 100, 1000  # in one request to MLflow
_LONGEST_VALUE = 500  # of a parameter in MLflow


class Target(Protocol):
    """One run in a logger; `taken` counts the events that it has."""

    taken: int

    def begin_again(self) -> None:
        """Leave the run that has more events than metrics.jsonl, and begin another one."""
        ...

    def log(self, events: Sequence[Event]) -> None: ...

    def end(self, ended: str) -> None: ...

    def describe(self) -> str: ...


def name_numbers(event: Event) -> dict[str, float]:
    """The numbers of an event by the names that loggers show; those of a whole epoch have names of their own."""
    prefix = "epoch_" if event.get("event") == "epoch" else ""
    return {
        key if key.startswith(("train_", "valid_")) else f"{prefix}{key}": value
        for key, value in event.items()
        if key not in _NO_METRICS and is_number(value)
    }


def flatten(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a recipe by their dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


class WandbRun:
    """A run of Weights & Biases in the run folder, one row an event; offline, a resumed run is written again whole."""

    def __init__(self, folder: RunFolder, parameters: Mapping[str, Any]) -> None:
        self._folder, self._parameters = folder, parameters
        self._state = folder.logs / "wandb.json"
        self._begin(_read_state(self._state).get("id") or secrets.token_hex(4))

    def _begin(self, number: str) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        write_durably(self._state, json.dumps({"id": number}) + "\n")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tutti"),
            id=number,
            name=os.environ.get("WANDB_NAME", self._folder.path.name),
            dir=str(self._folder.path),
            config=dict(self._parameters),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")
        self.taken = self._run.step
        if self._run.offline:  # the new files get all events, and replace those of earlier starts
            for path in Path(self._run.dir).parent.parent.glob(f"offline-run-*-{number}"):
                if path != Path(self._run.dir).parent:
                    shutil.rmtree(path, ignore_errors=True)

    def begin_again(self) -> None:
        self._run.finish()
        self._begin(secrets.token_hex(4))

    def log(self, events: Sequence[Event]) -> None:
        for event in events:
            self._run.log({"step": event["step"], "epoch": event["epoch"], **name_numbers(event)})
        self.taken += len(events)

    def end(self, ended: str) -> None:
        self._run.finish(exit_code=0 if ended == "finished" else 1)

    def describe(self) -> str:
        if self._run.offline:
            return f"wandb: offline; upload it with: wandb sync {Path(self._run.dir).parent}"
        return f"wandb: {self._run.url}"


class MlflowRun:
    """A run of MLflow at MLFLOW_TRACKING_URI, or in the file mlflow.db of the folder `out`."""

    def __init__(self, folder: RunFolder, parameters: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self._folder, self._parameters = folder, parameters
        self._state = folder.logs / "mlflow.json"
        known = _read_state(self._state)
        self._out = Path(str(parameters.get("out", "runs"))).resolve()
        self._store = os.environ.get("MLFLOW_TRACKING_URI") or known.get("store") or f"sqlite:///{self._out}/mlflow.db"
        self._number = ""
        with self._alone():
            self._client = MlflowClient(tracking_uri=self._store)
            if known.get("store") == self._store:
                self._continue(known["id"])
            if not self._number:
                self._begin()
        self._log_parameters()

    def _alone(self) -> AbstractContextManager[None]:
        """Keep other runs away from a file as store: two that create its tables at once fail."""
        return _locked(self._out / ".mlflow.lock") if self._store.startswith("sqlite:") else nullcontext()

    def _continue(self, number: str) -> None:
        """Continue a run, if the store still has it."""
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        with contextlib.suppress(MlflowException):
            found = self._client.get_run(number)
            if found.info.lifecycle_stage == "active":
                self._number, self.taken = number, int(found.data.tags.get("tutti.events", "0"))
                self._client.update_run(number, status="RUNNING")

    def _begin(self) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or str(self._parameters.get("recipe", "tutti"))
        tags = {"tutti.folder": str(self._folder.path.resolve())}
        run = self._client.create_run(self._find_experiment(name), run_name=self._folder.path.name, tags=tags)
        self._number, self.taken = run.info.run_id, 0
        write_durably(self._state, json.dumps({"id": self._number, "store": self._store}) + "\n")

    def _find_experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        known = self._client.get_experiment_by_name(name)
        if known is None:
            place = (self._out / "mlflow-artifacts").as_uri() if self._store.startswith("sqlite:") else None
            try:
                return self._client.create_experiment(name, artifact_location=place)
            except MlflowException:  # another run may have created it meanwhile
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        return known.experiment_id

    def _log_parameters(self) -> None:
        """Log the recipe; a value that a resumed run has changed becomes a tag, since parameters are for ever."""
        from mlflow.entities import Param, RunTag  # pyright: ignore[reportMissingImports]

        there = self._client.get_run(self._number).data.params
        here = {key: str(value)[:_LONGEST_VALUE] for key, value in flatten(self._parameters)}
        new = [Param(key, value) for key, value in here.items() if key not in there]
        for start in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self._number, params=new[start : start + _MOST_PARAMETERS])
        tags = [RunTag(f"resumed.{key}", here[key]) for key in here.keys() & there.keys() if here[key] != there[key]]
        self._client.log_batch(self._number, tags=tags)

    def begin_again(self) -> None:
        self._client.set_terminated(self._number, "KILLED")
        self._begin()
        self._log_parameters()

    def log(self, events: Sequence[Event]) -> None:
        """Log the numbers with the times of their events; logged twice after a crash, a number is stored once."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        numbers = [
            Metric(key, float(value), int(event["time"] * 1000), event["step"])
            for event in events
            for key, value in name_numbers(event).items()
        ]
        for start in range(0, len(numbers), _MOST_METRICS):
            self._client.log_batch(self._number, metrics=numbers[start : start + _MOST_METRICS])
        self.taken += len(events)
        self._client.set_tag(self._number, "tutti.events", str(self.taken))

    def end(self, ended: str) -> None:
        self._client.set_terminated(self._number, {"finished": "FINISHED", "failed": "FAILED"}.get(ended, "KILLED"))

    def describe(self) -> str:
        return f"mlflow: run {self._number} in {self._store}"


TARGETS = {"wandb": WandbRun, "mlflow": MlflowRun}


def pass_on(target: Target, metrics: Path, size: int, messages: Iterable[dict[str, Any]]) -> Iterator[int]:
    """Log the events up to the sizes in messages, each once; yields the sizes up to which they are logged."""
    with open(metrics, "rb") as file:
        events = _parse(file.read(size))
        if target.taken > len(events):
            target.begin_again()
        target.log(events[target.taken :])
        yield size
        for message in messages:
            target.log(_parse(file.read(max(0, message["size"] - file.tell()))))
            yield message["size"]
            if "ended" in message:
                target.end(message["ended"])
                return
    target.end("killed")


def _parse(lines: bytes) -> list[Event]:
    return [event for line in lines.splitlines() if (event := parse_event(line)) is not None]


def _read_state(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        if isinstance(found, dict):
            return {key: value for key, value in found.items() if isinstance(value, str)}
    return {}


def main(name: str, path: str, size: str) -> int:
    """Pass on what standard input tells, to its end; the last line of standard error says what has failed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # they are for the run, which tells how it ends
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print
    folder = RunFolder(Path(path))
    try:
        with _locked(folder.logs / f"{name}.lock"):  # the process of an earlier start may not have ended yet
            target = TARGETS[name](folder, yaml.safe_load(folder.config.read_text()))
            _answer(answers, say=target.describe())
            for done in pass_on(target, folder.metrics, int(size), _messages()):
                _answer(answers, taken=done)
    except Exception as error:
        traceback.print_exc()
        print(summarise_error(error).splitlines()[0], file=sys.stderr, flush=True)
        return 1
    return 0


def _answer(answers: int, **values: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the run was killed: what it has committed is passed on all the same
        os.write(answers, (json.dumps(values) + "\n").encode())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock of the system, which ends with this process; without one where the file system has none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _messages() -> Iterator[dict[str, Any]]:
    """The messages of the run, to its end; from there on an alarm ends this process, whatever hangs in it."""
    for line in sys.stdin:
        message = json.loads(line)
        if "ended" in message:
            signal.alarm(_END_SECONDS)
        yield message
    signal.alarm(_END_SECONDS)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
