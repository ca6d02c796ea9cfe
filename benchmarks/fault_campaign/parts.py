"""What the runs of the campaign train: samples that carry their number, and a network that writes down what it sees.

Every rank writes a file of its own with the samples of each forward pass and a digest of the weights, which is how the
campaign knows what was trained on, whatever the run's own files say. At the moment that `plan.json` names, the rank
does what is asked of it, or waits until the campaign has done it.
"""

import faulthandler
import hashlib
import json
import os
import platform
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

TRAIN, VALID = 240, 48
STEPS = 40
STEP_SECONDS = 0.02
HOLD_SECONDS = 60.0
HERE = Path(os.environ.get("FAULT_FOLDER", "."))


class Trace:
    """What one rank writes down, and the moment for which it looks out."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
        self.passes = 0  # of training; the first is the dry run
        self.evaluations = 0
        self.counts: dict[str, int] = {}
        self.plan: dict[str, Any] = {}
        name = f"trace-{platform.node()}-{os.getpid()}-{time.monotonic_ns()}.jsonl"
        self.file = open(HERE / name, "a", buffering=1)  # noqa: SIM115
        if (HERE / "plan.json").exists():
            plan = json.loads((HERE / "plan.json").read_text())
            self.plan = plan if plan["rank"] == self.rank else {}
        start = f"{os.environ.get('FAULT_START', '')} {os.environ.get('SLURM_RESTART_COUNT', '')}".strip()
        parent = os.getppid()
        self.write(
            event="start", rank=self.rank, start=start, time=time.monotonic_ns(),
            host=platform.node(), pid=os.getpid(), parent=parent,
        )  # fmt: skip

    def write(self, **event: Any) -> None:
        self.file.write(json.dumps(event) + "\n")

    @property
    def phase(self) -> str:
        """Where the rank is, for a write that is made durable."""
        if self.passes - 1 >= STEPS:
            return "end"
        return "checkpoint" if self.passes > 1 else "start"

    def reached(self, moment: str, number: int | None = None) -> None:
        """Do what is planned for this moment, once in a campaign's run."""
        count = self.counts[moment] = self.counts.get(moment, 0) + 1
        if self.plan.get("moment") != moment or self.plan["at"] != (count if number is None else number):
            return
        deed, self.plan = self.plan["deed"], {}
        try:
            (HERE / "plan.json").rename(HERE / "plan.done")
        except OSError:
            return
        self.write(event="fault", moment=moment, number=number or count, step=self.passes - 1)
        if deed == "out of memory":
            _use_up_memory()
        elif deed == "NaN loss":
            self.write(event="nan", step=self.passes - 1)
            Net.factor = float("nan")
        elif deed.startswith("clock"):
            offset, true = float(deed.split()[1]), time.time
            time.time = lambda: true() + offset
        else:
            _hold()


def _hold() -> None:
    """Say that the moment has come, and wait until the fault has been made."""
    (HERE / "reached").touch()
    deadline = time.monotonic() + HOLD_SECONDS
    while not (HERE / "made").exists() and time.monotonic() < deadline:
        time.sleep(0.002)


def _use_up_memory() -> None:
    """Ask for more memory than this process may have."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    torch.empty(1 << 30, dtype=torch.uint8).fill_(1)


trace: Trace | None = None


def _begin() -> Trace:
    """Open the trace of this rank, and have every durable write be one of its moments."""
    global trace
    if trace is None:
        trace = Trace()
        stacks = open(HERE / f"stacks-{trace.rank}-{os.getpid()}.txt", "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, stacks)  # where a rank is that hangs, for the campaign to ask
        for name in ("fsync", "replace", "rename"):
            setattr(os, name, _noticed(getattr(os, name), trace))
    return trace


def _noticed(call: Any, own: Trace) -> Any:
    def noticed(*arguments: Any, **options: Any) -> Any:
        if "plan" not in str(arguments[0]):
            own.reached(own.phase)
        return call(*arguments, **options)

    return noticed


class Numbered:
    """Random images whose first pixel is the number of the sample."""

    def __init__(self, split: str) -> None:
        own = _begin()
        if split == "train":
            own.reached("start")
        count = TRAIN if split == "train" else VALID
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        self.images = torch.randn(count, 1, 8, 8, generator=generator)
        self.labels = torch.randint(0, 10, (count,), generator=generator)
        self.images[:, 0, 0, 0] = torch.arange(count) / 1024
        self.input_shape, self.num_classes = (1, 8, 8), 10

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, ids: Any, draws: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[ids], self.labels[ids]


class Net(nn.Module):
    """A small network that writes down the samples of each forward pass."""

    factor = 1.0

    def __init__(self, input_shape: Any, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, num_classes))
        self.evaluated = -1

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        own = _begin()
        if self.training:
            own.passes += 1
            own.write(event="train", ids=(images[:, 0, 0, 0] * 1024).round().long().tolist())
            time.sleep(STEP_SECONDS)
            own.reached("step", own.passes - 1)
        elif self.evaluated != own.passes:
            self.evaluated = own.passes
            own.evaluations += 1
            own.write(event="eval", weights=self.digest())
            own.reached("validation", own.evaluations)
        return self.layers(images) * Net.factor

    def digest(self) -> str:
        """Return a digest of all bits of the weights."""
        digest = hashlib.sha1()
        for value in self.state_dict().values():
            digest.update(value.detach().cpu().numpy().tobytes())
        return digest.hexdigest()
