"""The placement of a rank in its job, and what every environment reader needs to find it."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import LaunchError
from tutti.ranks.rendezvous import derive_ports

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """Which rank this process is, of how many, and the address of the rendezvous."""

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    address: str | None = None
    port: int | None = None
    key: str | None = None  # tells this job from others of the user; None where the port is given and not derived

    def checked(self) -> "Placement":
        """Return this placement, or raise an error if its numbers contradict each other."""
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
    """Return the first of the named variables as an integer."""
    for name in names:
        if name in env:
            try:
                return int(env[name])
            except ValueError:
                raise LaunchError(f"{name}={env[name]!r}: expected a whole number from the launcher.") from None
    if default is None:
        raise LaunchError(f"{' or '.join(names)} is not set, although the other variables of its launcher are.")
    return default


def job_rendezvous(env: Environment, job: str) -> tuple[int, str | None]:
    """Return MASTER_PORT, or the first port and the key derived from the job, equal on all of its ranks."""
    if "MASTER_PORT" in env:
        return number(env, "MASTER_PORT"), None
    key = hashlib.sha256(f"{os.getuid()} {job}".encode()).hexdigest()[:16]
    return derive_ports(key)[0], key


def rendezvous_address(env: Environment, launcher: str, one_host: bool, slurm_list: str) -> str:
    """Return the host of rank 0 according to the environment; never a guess."""
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
    """Return MASTER_ADDR, or this host if all ranks are on it; None otherwise."""
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if one_host else None)
    if address and not one_host and re.fullmatch(r"localhost|127\.[\d.]+|::1", address):
        raise LaunchError(
            f"MASTER_ADDR={address}, but {launcher} has started ranks on several hosts, and on each that is another "
            "one. Unset it to have the first host of the job taken, or set it to the name of rank 0's host."
        )
    return address


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list: gpu03 of 'gpu[03-04,7],login1'."""
    match = re.match(r"(?:[\w.-]|\[\w+(?:-\w+)?(?:,\w+(?:-\w+)?)*\])+(?=,|$)", hosts)
    if not match:
        raise LaunchError(
            f"the list of hosts {hosts!r}: expected Slurm's form, such as 'n[1-4],m1'. "
            "Set MASTER_ADDR to the first host."
        )
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", match[0])


def _first_line(path: str) -> str:
    """Return the first host of the node file of PBS."""
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
    """Return the process id and command line of the nearest ancestor process of a name."""
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
