"""Real ranks over Gloo for tests: forked from a process that has torch loaded, so that starting them is quick."""

import contextlib
import functools
import importlib
import json
import os
import pickle
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prepared
from waiting import HangDetector


def run_ranks(
    world_size: int,
    work: Callable[..., Any] | str,
    *arguments: Any,
    expect_failure: bool = False,
    modules: tuple[str, ...] = prepared.TORCH,
) -> list[Any]:
    """Call `work(*arguments)` on every rank of a world of its own; what each returns, in the order of ranks.

    Work that this process should not import is given by its name, "module:function".
    """
    server = prepared.server(modules)
    with reserved_port() as port, tempfile.TemporaryDirectory(prefix="tutti-ranks-") as folder:
        answers = [Path(folder) / str(rank) for rank in range(world_size)]
        ranks = [
            server.start(_rank, str(answers[rank]), work, arguments, env=_variables(rank, world_size, port))
            for rank in range(world_size)
        ]
        hang = HangDetector()
        try:
            while waiting := [rank for rank in range(world_size) if ranks[rank].wait(0.02) is None]:
                hang.check(functools.partial("ranks {} did not end".format, waiting))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        found = [_read(path, rank, ranks[rank].returncode) for rank, path in enumerate(answers)]
    if not expect_failure:
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
    return found


def _read(path: Path, rank: int, code: int | None) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else RuntimeError(f"rank {rank}: {code}")


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return dict(os.environ) | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _rank(path: str, work: Callable[..., Any] | str, arguments: tuple) -> None:
    try:
        if isinstance(work, str):
            module, _, name = work.partition(":")
            work = getattr(importlib.import_module(module), name)
        answer = work(*arguments)
    except Exception as error:
        error.add_note(traceback.format_exc())
        answer = error
    Path(f"{path}.part").write_bytes(pickle.dumps(answer))
    Path(f"{path}.part").rename(path)
    os._exit(0)  # threads of torch may wait for ranks that are gone


def train(values: dict[str, Any], resume: str | None = None, kill_at_step: int | None = None) -> dict[str, Any]:
    """Train plain values as this rank; the folder, the results and the weights' sum come back."""
    import torch

    from tutti.config.load import resolve_values
    from tutti.ranks.environments import discover
    from tutti.train import job
    from tutti.train.run import run_rank
    from tutti.train.torch import TorchFramework

    if kill_at_step is not None:
        end_step = job.Job.end_step

        def end_step_or_die(self: job.Job, loss: Any) -> None:
            end_step(self, loss)
            if self.step == kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)

        job.Job.end_step = end_step_or_die
    config = resolve_values(values)
    outcome = run_rank(TorchFramework(), config, discover(os.environ), resume=Path(resume) if resume else None)
    own = [value.to_local() if hasattr(value, "to_local") else value for value in outcome.model.state_dict().values()]
    weights = torch.cat([value.double().reshape(-1) for value in own])
    return {"folder": outcome.folder.path, "results": outcome.results, "weights": weights.tolist()}


run_in_tensorflow = functools.partial(run_ranks, modules=prepared.TENSORFLOW)


class InTensorFlow:
    """The functions of a module that imports TensorFlow, by name, so that only ranks import it."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return f"{self._module}:{name}"


@contextlib.contextmanager
def reserved_port(address: str = "127.0.0.1") -> Iterator[int]:
    """A port that the kernel gives to nobody else meanwhile, and on which a server that reuses addresses may listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, 0))  # bound and not listening: others that ask for any port are given another
        yield held.getsockname()[1]


def read_ledger(folder: Path) -> dict[int, list[int]]:
    """The sample ids of every step over all ranks, in the order of the global batch."""
    parts: dict[int, dict[int, list[int]]] = {}
    for path in folder.glob("logs/ledger-*.jsonl"):
        rank = int(path.stem.split("-")[1])
        for line in path.read_text().splitlines():
            event = json.loads(line)
            assert rank not in parts.setdefault(event["step"], {}), f"step {event['step']} twice on rank {rank}"
            parts[event["step"]][rank] = event["ids"]
    return {step: [i for rank in sorted(found) for i in found[rank]] for step, found in sorted(parts.items())}


def read_losses(folder: Path) -> list[tuple[str, int, float]]:
    """Every loss that a run has told, with its event and step."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(e["event"] + key, e["step"], e[key]) for e in events for key in e if key.endswith("loss")]
