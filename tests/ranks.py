"""Real ranks over Gloo for tests: forked from a process that has torch loaded, so that starting them is quick."""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 120
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "tutti.train.run", "tensorflow", "ranks"])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def run_ranks(world_size: int, work: Callable[..., Any], *arguments: Any, expect_failure: bool = False) -> list[Any]:
    """Call `work(*arguments)` on every rank of a world of its own; what each returns, in the order of ranks."""
    port = free_port()
    queue = _context.SimpleQueue()
    ranks = [
        _context.Process(target=_rank, args=(queue, rank, world_size, port, work, arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while any(process.is_alive() for process in ranks) or not queue.empty():
            while not queue.empty():
                rank, answer = queue.get()
                found[rank] = answer
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {[r for r in range(world_size) if r not in found]} did not end")
            for process in ranks:
                process.join(0.02)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    answers = [found.get(rank, RuntimeError(f"rank {rank}: {ranks[rank].exitcode}")) for rank in range(world_size)]
    if not expect_failure:
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
    return answers


def _rank(queue: Any, rank: int, world_size: int, port: int, work: Callable[..., Any], arguments: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        queue.put((rank, work(*arguments)))
    except Exception as error:
        error.add_note(traceback.format_exc())
        queue.put((rank, error))


def train(values: dict[str, Any], resume: str | None = None, kill_at_step: int | None = None) -> dict[str, Any]:
    """Train plain values as this rank; the folder, the results and the weights' sum come back."""
    import torch

    from tutti.config.load import resolve_values
    from tutti.runtime.discovery import discover
    from tutti.train import job
    from tutti.train.run import run_rank

    if kill_at_step is not None:
        update = job.Job.update_weights

        def update_or_die(self: job.Job) -> None:
            update(self)
            if self.step == kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)

        job.Job.update_weights = update_or_die
    config = resolve_values(values)
    outcome = run_rank(config, discover(os.environ), resume=Path(resume) if resume else None)
    weights = torch.cat([value.double().reshape(-1) for value in outcome.model.state_dict().values()])
    return {"folder": outcome.folder.path, "results": outcome.results, "weights": weights.tolist()}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
