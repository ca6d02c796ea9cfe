"""What the programs share: alternating trials, medians with their spread, conditions, and commands with a deadline."""

import contextlib
import gc
import importlib.metadata
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tutti.data.mnist import FILES, find_file, read_idx
from tutti.errors import DataError
from tutti.runs.record import commit, hardware, versions

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "TUTTI_RUN")
_GRACE_SECONDS = 20


def default_data() -> Path:
    """The folder of the MNIST files, as the recipe of that name has it."""
    return Path(os.environ.get("TUTTI_DATA", "data")) / "mnist"


def read_images(folder: Path, seed: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The training images and labels as bytes and whole numbers, or random ones of their shape; and which it is."""
    try:
        images, labels = (find_file(folder, name) for name in FILES["train"])
    except DataError:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return images, torch.randint(0, 10, (60_000,), generator=generator), "random bytes"
    return torch.from_numpy(read_idx(images, 3)).unsqueeze(1), torch.from_numpy(read_idx(labels, 1)).long(), "MNIST"


def alternating(names: Sequence[str], trials: int) -> Iterator[tuple[int, str]]:
    """Trial and contender, A B C and then C B A, so that a machine that drifts favours none of them."""
    for trial in range(trials):
        for name in names if trial % 2 == 0 else reversed(names):
            yield trial, name


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median with the lowest and the highest of the trials."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def paired(values: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """The ratio to a peer, trial by trial, so that a slow minute is in both numbers of a ratio."""
    return spread([ours / theirs for ours, theirs in zip(values, peer, strict=True)])


def shown(value: Mapping[str, float], digits: int) -> list[str]:
    """Median, lowest and highest as the cells of a table."""
    return [f"{value[key]:,.{digits}f}" for key in ("median", "min", "max")]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns, the first to the left."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())


def print_verdict(bars: Mapping[str, bool]) -> None:
    """One line: every bar, and whether it is met."""
    print("; ".join(f"{bar}: {'met' if met else 'NOT met'}" for bar, met in bars.items()))


def conditions(**facts: Any) -> dict[str, Any]:
    """What the figures depend on; taken before the first trial, when the load is that of others."""
    found = versions()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["lightning"] = importlib.metadata.version("lightning")
    return {
        "versions": found,
        "hardware": hardware(),
        "commit": commit(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "clock": "time.perf_counter",
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    } | facts


def print_conditions(facts: Mapping[str, Any]) -> None:
    """The conditions that a reader of the table needs beside it."""
    found, machine = facts["versions"], facts["hardware"]
    words = [f"{name} {found[name]}" for name in ("python", "torch", "lightning") if name in found]
    words += [f"{machine['processor']}, {machine['cores']} cores", f"load {facts['load_before'][0]}"]
    words += [f"{facts['ranks']} rank(s)", f"{facts['trials']} trial(s)"]
    print("; ".join(words), flush=True)


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """The whole result, when a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n")


def environment(**more: str) -> dict[str, str]:
    """This environment without a launcher in it, with one thread a rank, and Gloo on the loopback interface."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if any(name == "lo" for _, name in socket.if_nameindex()) else {}
    return kept | loopback | {"OMP_NUM_THREADS": "1"} | more


def torchrun(ranks: int, folder: Path, script: str, arguments: Sequence[str]) -> list[str]:
    """The command that starts a script on several ranks of this machine, at a port that is free."""
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--log-dir={folder}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(Path(script).resolve()), *arguments]


def run_command(words: Sequence[str], cwd: Path, deadline_seconds: float, **env: str) -> float:
    """Run a command to its end and give its wall time; one that fails or is late ends this program."""
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen(words, cwd=cwd, env=environment(**env), stdout=output, stderr=output, text=True)
        try:
            code: int | None = process.wait(deadline_seconds)
            seconds = time.perf_counter() - began
        except subprocess.TimeoutExpired:
            code, seconds = None, deadline_seconds
        finally:
            _end(process)
        if code == 0:
            return seconds
        output.seek(0)
        tail = "".join(output.readlines()[-60:])
    problem = f"ended with exit code {code}" if code is not None else f"did not end within {deadline_seconds:g} s"
    raise SystemExit(f"{tail}\nerror: {' '.join(words)}: {problem}.")


def leave_group() -> None:
    """Leave the process group, after any DDP model: with one that outlives it torch 2.13 can abort as Python ends."""
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def end_children_with_me() -> None:
    """Have SIGTERM end this program by way of its `finally` blocks, in which what it has started is ended."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _end(process: subprocess.Popen[str]) -> None:
    """End a launcher, which ends its ranks; ranks die with a launcher that has to be killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
