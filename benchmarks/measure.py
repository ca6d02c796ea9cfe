"""Functions that the benchmarks share: alternating trials, medians and ranges, conditions, commands with a deadline."""

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
    """Returns the folder of the MNIST files, as in the recipe `mnist`."""
    return Path(os.environ.get("TUTTI_DATA", "data")) / "mnist"


def read_images(folder: Path, seed: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Returns the training images and labels, or random ones of their shape, and which of the two."""
    try:
        images, labels = (find_file(folder, name) for name in FILES["train"])
    except DataError:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return images, torch.randint(0, 10, (60_000,), generator=generator), "random bytes"
    return torch.from_numpy(read_idx(images, 3)).unsqueeze(1), torch.from_numpy(read_idx(labels, 1)).long(), "MNIST"


@contextlib.contextmanager
def kept_folder(kept: Path | None, prefix: str) -> Iterator[Path]:
    """Yields the folder of --keep, which must be new or empty, or a temporary one."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
        return
    if kept.exists() and any(kept.iterdir()):
        sys.exit(f"--keep {kept}: expected a new or empty folder.")
    kept.mkdir(parents=True, exist_ok=True)
    yield kept.resolve()


def alternating(names: Sequence[str], trials: int) -> Iterator[tuple[int, str]]:
    """Yields trial and contender in the order A B C, C B A, so that a drift of the machine favours none."""
    for trial in range(trials):
        for name in names if trial % 2 == 0 else reversed(names):
            yield trial, name


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, minimum and maximum of the trials."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def paired(values: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """Returns the ratio to a peer within each trial, so that a slow minute affects both."""
    return spread([ours / theirs for ours, theirs in zip(values, peer, strict=True)])


def shown(value: Mapping[str, float], digits: int) -> list[str]:
    """Median, minimum and maximum as cells of a table."""
    return [f"{value[key]:,.{digits}f}" for key in ("median", "min", "max")]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints aligned columns, the first aligned to the left."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())


def print_verdict(bars: Mapping[str, bool]) -> None:
    """Prints every threshold and whether it is met, in one line."""
    print("; ".join(f"{bar}: {'met' if met else 'NOT met'}" for bar, met in bars.items()))


def conditions(**facts: Any) -> dict[str, Any]:
    """Returns the conditions of a measurement; call it before the first trial, when the load is that of others."""
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
    """Prints the main conditions."""
    found, machine = facts["versions"], facts["hardware"]
    words = [f"{name} {found[name]}" for name in ("python", "torch", "lightning") if name in found]
    words += [f"{machine['processor']}, {machine['cores']} cores", f"load {facts['load_before'][0]}"]
    words += [f"{facts['ranks']} rank(s)", f"{facts['trials']} trial(s)"]
    print("; ".join(words), flush=True)


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """Writes the result if a file is given."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n")


def environment(**more: str) -> dict[str, str]:
    """Returns the environment without launcher variables, with one thread per rank and Gloo on loopback."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if any(name == "lo" for _, name in socket.if_nameindex()) else {}
    return kept | loopback | {"OMP_NUM_THREADS": "1"} | more


def torchrun(ranks: int, folder: Path, script: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that starts a script on several ranks of this machine, at a free port."""
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--log-dir={folder}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(Path(script).resolve()), *arguments]


def run_command(words: Sequence[str], cwd: Path, deadline_seconds: float, **env: str) -> float:
    """Runs a command and returns its wall time; exits if it fails or exceeds the deadline."""
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
    """Destroys the process group after all DDP models: torch 2.13 can abort at exit if a model outlives it."""
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def end_children_with_me() -> None:
    """Makes SIGTERM raise an exception, so that `finally` blocks end the processes that were started."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a launcher and with it its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
