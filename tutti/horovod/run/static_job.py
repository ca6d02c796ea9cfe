"""A job of a fixed number of ranks over hosts: all start together, and the failure of one ends all."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tutti.horovod.errors import describe_failed_process
from tutti.horovod.run.arguments import StaticOptions
from tutti.launch.hosts import Slot, Ssh, check_hosts, is_local, rendezvous_address, without_launchers
from tutti.launch.supervisor import HostProcess, RankOutput, Stopped, end_processes, stopped_by_signals, wait_for_any
from tutti.ranks.cores import threads_per_rank


@dataclass(frozen=True)
class FailedRank:
    """The first rank that failed."""

    rank: int
    host: str
    code: int
    text: str  # how it ended

    def message(self) -> str:
        """Return our sentence, then the one that users of Horovod search for."""
        return (
            f"rank {self.rank} on host {self.host} {self.text}; the other ranks were ended.\n"
            f"{describe_failed_process(self.rank, self.code)}"
        )


def run_static(options: StaticOptions, command: Sequence[str]) -> int:
    """Run a command on every rank to its end; return the exit code of the launcher."""
    try:
        failed = launch_static(options, command)
    except Stopped as stopped:
        print(f"horovodrun: {stopped}: all ranks were ended.", file=sys.stderr)
        return 128 + stopped.number
    if failed is None:
        return 0
    print(f"horovodrun: {failed.message()}", file=sys.stderr)
    return 1


def launch_static(options: StaticOptions, command: Sequence[str]) -> FailedRank | None:
    """Run a command on every rank to its end, or until one fails; no rank is left in any case."""
    hosts = [slot.host for slot in options.slots]
    ssh = Ssh(options.ssh_port, options.ssh_identity_file)
    base = without_launchers(options.environment) | options.secret.environment()
    ranks: list[HostProcess] = []
    with stopped_by_signals(), ExitStack() as held:
        check_hosts(hosts, ssh, base)
        address, port = rendezvous_address(hosts, ssh, base, options.network_interfaces, held)
        size = len(options.slots)
        outputs = [RankOutput(r, size, options.output_filename, options.prefix_timestamp) for r in range(size)]
        try:
            for slot, output in zip(options.slots, outputs, strict=True):
                own = base | rank_environment(slot, address, port, options.network_interfaces)
                if is_local(slot.host):
                    own["OMP_NUM_THREADS"] = str(threads_per_rank(slot.local_size, base))
                if options.verbose:
                    print(f"rank {slot.rank} on host {slot.host}: {shlex.join(command)}", file=sys.stderr)
                ranks.append(HostProcess(f"rank {slot.rank}", slot.host, command, own, output, ssh))
            return _watch(ranks)
        finally:
            end_processes(ranks)


def _watch(ranks: list[HostProcess]) -> FailedRank | None:
    """Wait until all ranks have ended with exit code 0, or one has failed."""
    left = list(ranks)
    while left:
        ended = {process: process.poll() or 0 for process in wait_for_any(left)}
        if any(ended.values()):
            # Of several that failed at once, one that a signal has ended: its exit code is negative.
            first = min((process for process in ended if ended[process]), key=lambda process: ended[process])
            return FailedRank(ranks.index(first), first.host, ended[first], first.describe_end())
        left = [process for process in left if process not in ended]
    return None


def rank_environment(slot: Slot, address: str, port: int, interfaces: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of one rank: its position, and the address of rank 0's store."""
    variables = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "RANK": slot.rank,
        "WORLD_SIZE": slot.size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_WORLD_SIZE": slot.local_size,
        "GROUP_RANK": slot.node_rank,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    own = position_environment(slot) | {name: str(value) for name, value in variables.items()}
    return own | interface_environment(interfaces)


def position_environment(slot: Slot) -> dict[str, str]:
    """Return Horovod's variables of a rank's position; in an elastic job they hold until `hvd.init()` sets new ones."""
    variables = {
        "HOROVOD_RANK": slot.rank,
        "HOROVOD_SIZE": slot.size,
        "HOROVOD_LOCAL_RANK": slot.local_rank,
        "HOROVOD_LOCAL_SIZE": slot.local_size,
        "HOROVOD_CROSS_RANK": slot.cross_rank,
        "HOROVOD_CROSS_SIZE": slot.cross_size,
        "HOROVOD_HOSTNAME": slot.host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "PYTHONUNBUFFERED": 1,
    }
    return {name: str(value) for name, value in variables.items()}


def interface_environment(interfaces: Sequence[str]) -> dict[str, str]:
    """Return the variables that name the chosen network interfaces to Gloo and NCCL."""
    if not interfaces:
        return {}
    every = ",".join(interfaces)
    return {"HOROVOD_GLOO_IFACE": interfaces[0], "GLOO_SOCKET_IFNAME": every, "NCCL_SOCKET_IFNAME": every}
