"""The workers of an elastic job: how they are started, and which ranks they get."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tutti.launch.elastic_talk import ADDRESS_VARIABLE, ELASTIC_VARIABLE, WORKER_VARIABLE, Ask, Place
from tutti.launch.horovodrun_options import ElasticOptions
from tutti.launch.hosts import Host, is_local, own_address
from tutti.launch.output import RankOutput
from tutti.launch.rank_environment import interface_environment, without_launchers
from tutti.launch.threads import threads_per_rank
from tutti.launch.workers import Ssh, Worker

_NUMBERS = 1000  # of workers, for the width of the names of their output folders


@dataclass
class Member:
    """A worker as the driver knows it."""

    number: int
    host: str
    slot: int  # which of its host's
    worker: Worker
    output: RankOutput
    started: float
    generation: int = -1  # in which it last had a place
    rank: int = -1
    ask: Ask | None = None  # it waits for a place
    leaving: bool = False  # its slot is no longer there
    dismissed: bool = False  # and it knows

    @property
    def name(self) -> str:
        rank = f"rank {self.rank}" if self.generation >= 0 else "without a rank yet"
        return f"worker {self.number} ({rank}, host {self.host})"

    @property
    def has_not_begun(self) -> bool:
        return self.generation < 0 and self.ask is None


def start(number: int, host: Host, slot: int, options: ElasticOptions, command: Sequence[str], port: int) -> Member:
    """A new worker, which finds the driver at a port of this machine."""
    here = is_local(host.name)
    interface = options.network_interfaces[0] if options.network_interfaces else None
    address = "127.0.0.1" if here else own_address(interface, host.name)
    environment = without_launchers(options.environment or os.environ)
    if here:
        environment["OMP_NUM_THREADS"] = str(threads_per_rank(host.slots, environment))
    environment |= interface_environment(options.network_interfaces)
    environment |= {
        ELASTIC_VARIABLE: "1",
        ADDRESS_VARIABLE: f"{address}:{port}",
        WORKER_VARIABLE: str(number),
        "HOROVOD_HOSTNAME": host.name,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "PYTHONUNBUFFERED": "1",
    }
    output = RankOutput(number, _NUMBERS, options.output_filename, options.prefix_timestamp)
    ssh = Ssh(options.ssh_port, options.ssh_identity_file)
    worker = Worker(f"worker {number}", host.name, command, environment, output, ssh)
    if options.verbose:
        print(f"elastic driver: worker {number} is started on {host.name}, slot {slot}.", file=sys.stderr, flush=True)
    return Member(number, host.name, slot, worker, output, time.monotonic())


def arrange(members: Sequence[Member]) -> dict[int, Place]:
    """Ranks for workers, by their numbers: those with the state first, then as they were, then those that are new.

    On a host, a worker's local rank is its slot where that fits, so that it is as good a choice of a GPU as it was.
    """
    newest = max(member.generation for member in members)

    def order(member: Member) -> tuple[Any, ...]:
        survives = member.generation == newest >= 0
        has_state = survives and member.ask is not None and member.ask.has_state
        return not has_state, not survives, member.rank if survives else 0, member.number

    ranked = sorted(members, key=order)
    hosts = list(dict.fromkeys(member.host for member in ranked))
    local_ranks: dict[int, int] = {}
    for host in hosts:
        here = [member for member in ranked if member.host == host]
        free = iter(set(range(len(here))) - {member.slot for member in here})
        for member in here:
            local_ranks[member.number] = member.slot if member.slot < len(here) else next(free)
    return {
        member.number: Place(
            rank=rank,
            size=len(ranked),
            local_rank=local_ranks[member.number],
            local_size=sum(other.host == member.host for other in ranked),
            node_rank=hosts.index(member.host),
        )
        for rank, member in enumerate(ranked)
    }
