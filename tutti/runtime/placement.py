"""A rank's place in its run, and what every environment reader needs to find it."""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from tutti.errors import LaunchError

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """Which rank this process is, of how many, and where they meet."""

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    address: str | None = None
    port: int | None = None

    def checked(self) -> "Placement":
        """Itself, if its numbers agree with each other."""
        pairs = (("rank", self.rank, self.world_size), ("local rank", self.local_rank, self.local_size))
        for name, number, size in pairs:
            if not 0 <= number < size:
                raise LaunchError(
                    f"{self.launcher} says {name} {number} of {size}: expected 0 to {size - 1}. "
                    "Check for variables left over from another launcher (env | grep -E 'RANK|SIZE|PMI|SLURM')."
                )
        if self.local_size > self.world_size:
            raise LaunchError(
                f"{self.launcher} says {self.local_size} ranks on this host, but {self.world_size} in all. "
                "Check for variables left over from another launcher."
            )
        return self


def number(env: Environment, *names: str, default: int | None = None) -> int:
    """The first of the named variables as a whole number."""
    for name in names:
        if name in env:
            try:
                return int(env[name])
            except ValueError:
                raise LaunchError(f"{name}={env[name]!r}: expected a whole number from the launcher.") from None
    if default is None:
        raise LaunchError(f"{' or '.join(names)} is not set, although the other variables of its launcher are.")
    return default


def job_port(env: Environment, job: str) -> int:
    """MASTER_PORT, else a port that every rank of a job derives alike, below those that the system hands out."""
    return number(env, "MASTER_PORT", default=15_000 + zlib.crc32(job.encode()) % 16_000)


def meeting_address(env: Environment, launcher: str, one_host: bool) -> str:
    """The host of rank 0 as far as the environment tells; never a guess."""
    if address := env.get("MASTER_ADDR"):
        return address
    if one_host:
        return "127.0.0.1"
    if path := env.get("PBS_NODEFILE"):
        try:
            with open(path) as hosts:
                return hosts.readline().strip()
        except OSError as error:
            raise LaunchError(
                f"PBS_NODEFILE={path!r} cannot be read: {error.strerror}. Set MASTER_ADDR to the first host."
            ) from error
    raise LaunchError(
        f"{launcher} has started ranks on several hosts and none of MASTER_ADDR and PBS_NODEFILE says where rank 0 is. "
        "Set MASTER_ADDR to the name of the first host."
    )


def ancestor(name: str) -> int:
    """The process id of the nearest ancestor with a name, else of the parent."""
    process = os.getppid()
    while process > 1:
        try:
            with open(f"/proc/{process}/stat") as file:
                words = file.read().rpartition(")")
        except OSError:
            break
        if name.startswith(words[0].partition("(")[2]):
            return process
        process = int(words[2].split()[1])
    return os.getppid()
