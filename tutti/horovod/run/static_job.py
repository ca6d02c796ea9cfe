"""A job of a fixed number of ranks over hosts: all start, and the failure of one ends all."""

import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tutti.horovod.run.arguments import StaticOptions
from tutti.launch.hosts import is_local
from tutti.launch.output import RankOutput
from tutti.launch.workers import Ssh, Worker, check_hosts, end_all, meeting_point, rank_environment, without_launchers
from tutti.ranks.cores import threads_per_rank

_POLL_SECONDS = 0.02
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ending:
    """The first rank that failed."""

    rank: int
    host: str
    code: int
    text: str  # how it ended

    def message(self) -> str:
        """What the screen shows: our words, then those that Horovod's users look for."""
        return (
            f"rank {self.rank} on host {self.host} {self.text}; the other ranks were ended.\n"
            "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated. The first process to do so was:\nProcess name: {self.rank}\nExit code: {self.code}"
        )


class Stopped(BaseException):
    """A signal asks the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_static(options: StaticOptions, command: Sequence[str]) -> int:
    """Run a command on every rank to its end; the exit code of the launcher."""
    try:
        ending = launch_static(options, command)
    except Stopped as stopped:
        print(f"horovodrun: {stopped}: all ranks were ended.", file=sys.stderr)
        return 128 + stopped.number
    if ending is None:
        return 0
    print(f"horovodrun: {ending.message()}", file=sys.stderr)
    return 1


def launch_static(options: StaticOptions, command: Sequence[str]) -> Ending | None:
    """Run a command on every rank to its end, or until one fails; none is left in any case."""
    hosts = [slot.host for slot in options.slots]
    ssh = Ssh(options.ssh_port, options.ssh_identity_file)
    base = without_launchers(options.environment)
    workers: list[Worker] = []
    with stopped_by_signals():
        check_hosts(hosts, ssh, base)
        address, port = meeting_point(hosts, ssh, base, options.network_interfaces)
        size = len(options.slots)
        outputs = [RankOutput(r, size, options.output_filename, options.prefix_timestamp) for r in range(size)]
        try:
            for slot, output in zip(options.slots, outputs, strict=True):
                own = base | rank_environment(slot, address, port, options.network_interfaces)
                if is_local(slot.host):
                    own["OMP_NUM_THREADS"] = str(threads_per_rank(slot.local_size, base))
                if options.verbose:
                    print(f"rank {slot.rank} on host {slot.host}: {shlex.join(command)}", file=sys.stderr)
                workers.append(Worker(f"rank {slot.rank}", slot.host, command, own, output, ssh))
            return _watch(workers)
        finally:
            end_workers(workers)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Have the signals that end a launcher raise `Stopped` in its main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: Any) -> None:
    raise Stopped(number)


def _watch(workers: list[Worker]) -> Ending | None:
    """Wait until all ranks have ended well, or one has not."""
    left = dict(enumerate(workers))
    while left:
        ended = {rank: code for rank, worker in left.items() if (code := worker.poll()) is not None}
        failed = [rank for rank, code in ended.items() if code]
        if failed:
            rank = min(failed, key=lambda each: ended[each])  # of several at once, one that a signal has ended
            return Ending(rank, left[rank].host, ended[rank], left[rank].how_it_ended())
        for rank in ended:
            del left[rank]
        time.sleep(_POLL_SECONDS)
    return None


def end_workers(workers: list[Worker]) -> None:
    """End what is left; another signal meanwhile ends it without grace."""
    while True:
        try:
            end_all(workers)
            return
        except Stopped:
            for worker in workers:
                worker.kill()
