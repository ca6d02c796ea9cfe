"""How the ranks of a point are started: on this machine, or as a step of the current allocation."""

import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tutti.errors import LaunchError
from tutti.launch.cluster.resources import Wishes, load_site, settle
from tutti.launch.cluster.submission import launcher_command
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.environments import discover
from tutti.ranks.environments.slurm import tasks_per_node
from tutti.ranks.process import describe_exit
from tutti.runs.folder import RunFolder
from tutti.runs.output import last_lines
from tutti.runs.record import describe_failure, is_after, read_record

_LONGEST_REASON = 300


def failure_reason(run: RunFolder, since: str, code: int, log: Path) -> str:
    """Returns in one line why a run failed: from its record if written since the start, else from its exit code."""
    record = read_record(run.record) or {}
    if "failure" in record and is_after(record.get("ended"), since):
        return describe_failure(record)[:_LONGEST_REASON]
    last = next((line.strip() for line in reversed(last_lines(log)) if line.strip()), None)
    ended = describe_exit(code)
    return f"{ended}; its last line: {last}"[:_LONGEST_REASON] if last else f"{ended} without any output"


_TUTTI = [sys.executable, "-m", "tutti"]
_NODE_FILES = ("PBS_NODEFILE", "COBALT_NODEFILE")


class Executor(Protocol):
    """Starts the ranks of a point."""

    @property
    def most(self) -> int | None:
        """The largest number of ranks, if known."""
        ...

    def command(self, folder: Path, ranks: int) -> list[str]:
        """Returns the command that trains in a run folder on a number of ranks."""
        ...

    def describe(self) -> str:
        """Describes in words where the ranks run."""
        ...


@dataclass(frozen=True)
class Local:
    """Starts ranks on this machine."""

    most: int | None = None

    def command(self, folder: Path, ranks: int) -> list[str]:
        return [*_TUTTI, "train", str(folder), "-n", str(ranks)]

    def describe(self) -> str:
        return "on this machine"


@dataclass(frozen=True)
class SlurmSteps:
    """Starts each point as a step of the current Slurm job."""

    sizes: tuple[int, ...]  # ranks on each node
    cores_per_rank: int | None = None

    @property
    def most(self) -> int:
        return sum(self.sizes)

    def command(self, folder: Path, ranks: int) -> list[str]:
        per_node = min(ranks, max(self.sizes))
        nodes = self._nodes(ranks)
        requested = Wishes(nodes=nodes, ranks=ranks, ranks_per_node=per_node, cores_per_rank=self.cores_per_rank)
        site = load_site("slurm", None)
        line = launcher_command(site, settle(requested, site, folder.name), ())
        return [*shlex.split(line), *_TUTTI, "train", str(folder)]

    def describe(self) -> str:
        return f"as steps on {len(self.sizes)} nodes of this Slurm job"

    def _nodes(self, ranks: int) -> int:
        """Returns the smallest number of nodes that fits the ranks, largest nodes first."""
        capacity = 0
        for number, size in enumerate(sorted(self.sizes, reverse=True), start=1):
            capacity += size
            if capacity >= ranks:
                return number
        return len(self.sizes)


@dataclass(frozen=True)
class MpiSteps:
    """Starts each point by mpirun on the hosts of the current allocation."""

    hosts: int
    ranks_per_node: int

    @property
    def most(self) -> int:
        return self.hosts * self.ranks_per_node

    def command(self, folder: Path, ranks: int) -> list[str]:
        return ["mpirun", "-np", str(ranks), *_TUTTI, "train", str(folder)]

    def describe(self) -> str:
        return f"by mpirun on {self.hosts} hosts of this allocation"


def choose_executor(env: Mapping[str, str], ranks_per_node: int | None = None) -> Executor:
    """Chooses steps inside an allocation of several nodes, and this machine otherwise."""
    placement = discover(env)
    if placement.world_size > 1:
        raise LaunchError(
            f"{placement.launcher} has started {placement.world_size} ranks of this command: a study starts the ranks "
            "of its points itself. Call it once, without a launcher."
        )
    nodes = int(env.get("SLURM_JOB_NUM_NODES", 1))
    # Slurm sets SLURMD_NODENAME on nodes of the job only: the shell of salloc may be on the login host.
    if "SLURM_JOB_ID" in env and (nodes > 1 or "SLURMD_NODENAME" not in env):
        sizes = tasks_per_node(env.get("SLURM_TASKS_PER_NODE", f"1(x{nodes})"))
        cores = env.get("SLURM_CPUS_PER_TASK", "")
        own = tuple([ranks_per_node] * len(sizes) if ranks_per_node else sizes)
        return SlurmSteps(own, int(cores) if cores.isdecimal() and not ranks_per_node else None)
    file = next((env[name] for name in _NODE_FILES if name in env), None)
    if file is not None and Path(file).is_file():
        hosts = Counter(Path(file).read_text(errors="replace").split())
        if len(hosts) > 1:
            return MpiSteps(len(hosts), ranks_per_node or max(hosts.values()))
    if ranks_per_node is not None:
        raise LaunchError(
            f"--ranks-per-node {ranks_per_node}: there is one node here, and no allocation of several. "
            "Leave it out, or submit the points as jobs with --on."
        )
    return Local()


def check_capacity(executor: Executor, ranks: int) -> None:
    """Raises LaunchError for more ranks than the allocation has."""
    if executor.most is not None and ranks > executor.most:
        raise LaunchError(
            f"{ranks} ranks {executor.describe()}: expected {executor.most} at most. Use fewer ranks, set the "
            "ranks of a node with --ranks-per-node, or get a larger allocation."
        )


def check_at_once(executor: Executor, at_once: int | None) -> None:
    """Raises LaunchError for concurrent points where each uses the whole allocation."""
    if at_once is None:
        return
    if at_once < 1:
        raise LaunchError(f"--at-once {at_once}: expected 1 or more.")
    if at_once > 1 and not isinstance(executor, Local):
        raise LaunchError(
            f"--at-once {at_once}: points that run {executor.describe()} run one after another. Leave it out, or call "
            "tutti on one machine."
        )


def step_environment(env: Mapping[str, str], sharing: int = 1) -> dict[str, str]:
    """Returns the environment of a point, without the job's numbers of tasks, which do not apply to every step.

    `sharing` is the number of ranks of concurrent points that share the cores of this machine.
    """
    given = {name: value for name, value in env.items() if name not in ("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")}
    if sharing > 1:
        given.setdefault("OMP_NUM_THREADS", str(threads_per_rank(sharing, env)))
    return given


def command_line(command: list[str]) -> str:
    """Returns a command as a user would type it."""
    line, module = shlex.join(command), shlex.join(_TUTTI)
    return line.replace(module, "tutti", 1)
