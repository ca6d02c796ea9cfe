"""A rank's place in its run, and what every environment reader needs to find it."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import LaunchError
from tutti.ranks.rendezvous import door_ports

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
    key: str | None = None  # known to the ranks of this job alone; None where the port is given and not derived

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


def job_door(env: Environment, job: str) -> tuple[int, str | None]:
    """MASTER_PORT, else the first port and the key that every rank of a job derives alike."""
    if "MASTER_PORT" in env:
        return number(env, "MASTER_PORT"), None
    key = hashlib.sha256(f"{os.getuid()} {job}".encode()).hexdigest()[:16]
    return door_ports(key)[0], key


def meeting_address(env: Environment, launcher: str, one_host: bool, slurm_list: str) -> str:
    """The host of rank 0 as far as the environment tells; never a guess."""
    if address := given_address(env, launcher, one_host):
        return address
    if path := env.get("PBS_NODEFILE"):
        return _first_line(path)
    if hosts := env.get(slurm_list) or env.get("SLURM_JOB_NODELIST"):
        return first_host(hosts)
    raise LaunchError(
        f"{launcher} has started ranks on several hosts and none of MASTER_ADDR, PBS_NODEFILE and SLURM_JOB_NODELIST "
        "says where rank 0 is. Set MASTER_ADDR to the name of its host."
    )


def given_address(env: Environment, launcher: str, one_host: bool) -> str | None:
    """MASTER_ADDR, or this host if all ranks are on it; None if it is to be found."""
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if one_host else None)
    if address and not one_host and re.fullmatch(r"localhost|127\.[\d.]+|::1", address):
        raise LaunchError(
            f"MASTER_ADDR={address}, but {launcher} has started ranks on several hosts, and on each that is another "
            "one. Unset it to have the first host of the job taken, or set it to the name of rank 0's host."
        )
    return address


def first_host(hosts: str) -> str:
    """The first of Slurm's short form of host names: 'gpu[03-04,7],login1' begins with gpu03."""
    match = re.match(r"(?:[\w.-]|\[\w+(?:-\w+)?(?:,\w+(?:-\w+)?)*\])+(?=,|$)", hosts)
    if not match:
        raise LaunchError(
            f"the list of hosts {hosts!r}: expected Slurm's form, such as 'n[1-4],m1'. "
            "Set MASTER_ADDR to the first host."
        )
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", match[0])


def _first_line(path: str) -> str:
    """The first host of PBS' file."""
    try:
        with open(path) as hosts:
            first = hosts.readline().strip()
    except OSError as error:
        raise LaunchError(
            f"PBS_NODEFILE={path!r} cannot be read: {error.strerror}. Set MASTER_ADDR to the first host."
        ) from error
    if not first:
        raise LaunchError(f"PBS_NODEFILE={path!r} names no host in its first line. Set MASTER_ADDR to the first host.")
    return first


def ancestor(name: str) -> list[str] | None:
    """The command line of the nearest ancestor with a name, its process id first."""
    process = os.getppid()
    while process > 1:
        try:
            words = Path(f"/proc/{process}/stat").read_text().rpartition(")")
            if name.startswith(words[0].partition("(")[2]):
                return [str(process), *Path(f"/proc/{process}/cmdline").read_text().split("\0")]
        except OSError:
            return None
        process = int(words[2].split()[1])
    return None
