"""The driver of an elastic job: starts workers where slots are free, and assigns ranks in each generation.

The driver holds the store at which the ranks of every generation meet, so that any of them may fail. It starts workers,
receives their requests for a rank, and forms the next generation when all running workers have asked. A worker that
fails ends its generation: the driver tells the others at once. Hosts that join or leave do not: ranks learn of them at
their next commit, when the new workers are ready.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tutti.errors import LaunchError
from tutti.horovod.run.arguments import ElasticOptions
from tutti.horovod.run.discovery import Blacklist, Discovery
from tutti.horovod.run.messages import (
    ADDRESS_VARIABLE,
    ASKS,
    ELASTIC_VARIABLE,
    WORKER_VARIABLE,
    Ask,
    News,
    Place,
    news_key,
    place_key,
)
from tutti.horovod.run.static_job import interface_environment, without_launchers
from tutti.launch.hosts import Host, Ssh, is_local, own_address
from tutti.launch.supervisor import HostProcess, RankOutput, Stopped, end_processes, stopped_by_signals
from tutti.ranks.cores import threads_per_rank

_NUMBERS = 1000  # of workers, for the width of the names of their output folders


@dataclass
class Member:
    """A worker as the driver knows it."""

    number: int
    host: str
    slot: int  # which of its host's
    process: HostProcess
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
    process = HostProcess(f"worker {number}", host.name, command, environment, output, ssh)
    if options.verbose:
        print(f"elastic driver: worker {number} is started on {host.name}, slot {slot}.", file=sys.stderr, flush=True)
    return Member(number, host.name, slot, process, output, time.monotonic())


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


if TYPE_CHECKING:
    from torch.distributed import TCPStore

_TICK_SECONDS = 0.05
_SAY_AFTER_SECONDS = 60.0


class JobFailed(Exception):
    """The job cannot go on; the message says why."""


def run_elastic(options: ElasticOptions, command: list[str]) -> int:
    """Run a command on as many ranks as there is room for, until all of them end well; the exit code."""
    check_numbers(options)
    try:
        with stopped_by_signals():
            driver = Driver(options, command)
            try:
                return driver.run()
            finally:
                driver.close()
    except JobFailed as failure:
        say(str(failure))
        return 1
    except Stopped as stopped:
        say(f"{stopped}: all workers were ended.")
        return 128 + stopped.number


def check_numbers(options: ElasticOptions) -> None:
    """Refuse numbers of ranks that contradict each other."""
    given = f"-np {options.np} --min-np {options.min_np}" + (f" --max-np {options.max_np}" if options.max_np else "")
    if not 1 <= options.min_np <= options.np <= (options.max_np or options.np):
        raise LaunchError(f"{given}: expected 1 <= min-np <= np <= max-np. Change the one that is out of order.")
    if options.host_discovery_script is None:
        slots = sum(host.slots for host in options.hosts)
        if slots < options.min_np:
            raise LaunchError(
                f"{given}, but the hosts have {slots} slots, and no script says that more may come. "
                "Name more with -H, give --host-discovery-script, or lower --min-np."
            )
    low, high = options.cooldown_range or (1.0, 1.0)
    if not 0 < low <= high:
        raise LaunchError(f"--blacklist-cooldown-range {low:g} {high:g}: expected 0 < MIN <= MAX, in seconds.")


@dataclass
class Driver:
    """The workers of one job, from the first generation to the last."""

    options: ElasticOptions
    command: list[str]
    generation: int = -1
    members: list[Member] = field(default_factory=list)
    _failures: list[str] = field(default_factory=list)  # of workers, the first first
    _broken: str = ""  # what has happened to a worker of this generation
    _done: Member | None = None  # the first worker that has ended well: nothing is formed any more
    _told: bool = False  # this generation, of other hosts
    _has_state: bool = False  # some worker has had something to lose
    _short_since: float | None = None
    _waits_since: float | None = None
    _started: int = 0

    def __post_init__(self) -> None:
        script = self.options.host_discovery_script
        self._discovery = Discovery(script, self.options.slots_per_host or 1) if script else None
        self._hosts: list[Host] = list(self.options.hosts)
        self._blacklist = Blacklist(self.options.cooldown_range)
        self._store: TCPStore = _hold_store()

    def run(self) -> int:
        """Until the job has ended."""
        while True:
            now = time.monotonic()
            self._see_hosts()
            self._see_ends(now)
            self._hear()
            if self._done is not None:
                code = self._finish()
                if code is not None:
                    return code
            else:
                self._start_workers(now)
                self._tell_of_hosts()
                self._form(now)
            time.sleep(_TICK_SECONDS)

    def close(self) -> None:
        """Leave no worker behind; another signal meanwhile ends them without grace."""
        if self._discovery is not None:
            self._discovery.stop()
        end_processes([member.process for member in self.members])

    def _current(self) -> list[Member]:
        return [member for member in self.members if member.generation == self.generation >= 0]

    # What has happened.

    def _see_hosts(self) -> None:
        if self._discovery is not None:
            self._hosts = self._discovery.hosts()
        slots = {host.name: host.slots for host in self._hosts}
        for member in self.members:
            member.leaving = member.dismissed or member.slot >= slots.get(member.host, 0)
            if member.leaving and member.ask and member.generation < self.generation:
                self._dismiss(member)

    def _see_ends(self, now: float) -> None:
        for member in list(self.members):
            code = member.process.poll()
            late = self.options.start_timeout
            if code is None and late and member.has_not_begun and now > member.started + late:
                member.process.kill()
                end_processes([member.process])
                self._fail(member, f"has not called hvd.init() within --start-timeout {late:g} s", now)
            elif code == 0 and member.generation == self.generation:
                self.members.remove(member)
                self._done = self._done or member
            elif code is not None:
                self._fail(member, member.process.describe_end(), now)

    def _fail(self, member: Member, how: str, now: float) -> None:
        self.members.remove(member)
        was_in = member.generation == self.generation >= 0
        if member.leaving and not was_in:
            return
        text = f"{member.name} {how}"
        self._failures.append(text)
        seconds = self._blacklist.add(member.host, now)
        rest = "for good" if seconds is None else f"for {seconds:.3g} s"
        say(f"{text}. No worker is started on {member.host} {rest}.")
        if was_in:
            self._broken = self._broken or text
            for other in self._current():
                self._tell(other, News("lost", self.generation, text))

    def _hear(self) -> None:
        for _ in range(self._store.queue_len(ASKS)):
            ask = Ask.decode(self._store.queue_pop(ASKS, False))
            for member in self.members:
                if member.number == ask.worker:
                    member.ask = ask
                    self._has_state = self._has_state or ask.has_state

    # What follows from it.

    def _finish(self) -> int | None:
        """After the first good end: the others end too, or cannot go on."""
        assert self._done is not None
        current = self._current() if self.generation >= 0 else self.members
        end_processes(member.process for member in self.members if member not in current)
        self.members = current
        for member in current:
            if member.ask is not None:
                self._refuse(member, f"{self._done.name} has ended its work; no new generation is formed after that.")
        if current:
            return None
        if self._broken or (self.generation < 0 and self._failures):
            raise JobFailed(f"the job has failed: {self._broken or self._failures[0]}, while other workers ended well.")
        return 0

    def _start_workers(self, now: float) -> None:
        """On every free slot, as far as max_np allows."""
        options = self.options
        if options.reset_limit is not None and self.generation >= options.reset_limit:
            return  # they could never have a place
        usable = self._blacklist.without(self._hosts, now)
        if not self.members and (self.generation >= 0 or sum(host.slots for host in usable) < options.min_np):
            return
        room = (options.max_np or sys.maxsize) - sum(not member.leaving for member in self.members)
        for host in usable:
            taken = {member.slot for member in self.members if member.host == host.name}
            for slot in [slot for slot in range(host.slots) if slot not in taken][: max(room, 0)]:
                self.members.append(start(self._started, host, slot, self.options, self.command, self._store.port))
                self._started += 1
                room -= 1

    def _tell_of_hosts(self) -> None:
        """Once a generation: some must leave it, or all who are new are ready to come in."""
        current = self._current()
        if self._told or not current or self._broken:
            return
        new = [member for member in self.members if member not in current and not member.leaving]
        ready = bool(new) and all(member.ask for member in new)
        leaving = any(member.leaving for member in current)
        if ready or leaving:
            self._told = True
            for member in current:
                self._tell(member, News("hosts", self.generation, skip_sync=not ready))

    def _form(self, now: float) -> None:
        """A new generation, when a worker of the last one wants it, all have asked, and they are enough."""
        current = self._current()
        if self.generation >= 0 and not current:
            raise JobFailed(
                f"the job has failed: no worker is left that knows how far it came. {self._first_failure()}"
            )
        if self.generation < 0 and not self.members and self._failures:
            raise JobFailed(f"the job has failed before it began: all workers have ended. {self._first_failure()}")
        if self.generation >= 0 and not any(member.ask for member in current):
            return
        self._check_reset_limit()
        staying = [member for member in self.members if not member.leaving]
        if len(staying) < self.options.min_np:
            self._check_shortage(len(staying), now)
            return
        self._short_since = None
        if waiting := [member for member in staying if member.ask is None]:
            self._say_who_is_late(waiting, now)
            return
        self._waits_since = None
        self._check_state(staying)
        self._place(staying, [member for member in self.members if member.leaving])

    def _check_shortage(self, count: int, now: float) -> None:
        """Too few: somebody may still come, if not for ever."""
        options = self.options
        if self._short_since is None:
            self._short_since = now
            say(f"{count} slots, fewer than --min-np {options.min_np}: waiting for more.")
        final = self._discovery is None and options.cooldown_range is None
        if final or now - self._short_since > options.elastic_timeout:
            hosts = ", ".join(f"{host.name}:{host.slots}" for host in self._hosts) or "none"
            out = ", ".join(self._blacklist.names(now)) or "none"
            waited = "and no more can come" if final else f"for --elastic-timeout {options.elastic_timeout:g} s"
            raise JobFailed(
                f"{count} slots could be used {waited}: expected {options.min_np} or more (--min-np). "
                f"Hosts: {hosts}; left alone after failures: {out}. {self._first_failure()}"
                "Give more hosts, lower --min-np, or let hosts come back with --blacklist-cooldown-range."
            )

    def _check_reset_limit(self) -> None:
        limit = self.options.reset_limit
        if limit is not None and self.generation >= limit:
            raise JobFailed(
                f"the job would be reset for the {_ordinal(self.generation + 1)} time, and --reset-limit is {limit}. "
                f"{self._first_failure()}"
            )

    def _check_state(self, staying: list[Member]) -> None:
        """Somebody must know how far the training came, once anybody did."""
        survivors = [member for member in staying if member.generation == self.generation]
        knows = any(member.ask is not None and member.ask.has_state for member in survivors)
        if self.generation >= 0 and (not survivors or (self._has_state and not knows)):
            raise JobFailed(
                "the job has failed: every worker that knew how far it came is gone, or its host is. "
                f"{self._first_failure()}"
            )

    def _place(self, staying: list[Member], leaving: list[Member]) -> None:
        new = [member for member in staying if member.generation < 0 or member.generation < self.generation]
        skip_sync = not new and all(member.ask is not None and member.ask.skip_sync for member in staying)
        places = arrange(staying)
        self.generation += 1
        self._broken, self._told = "", False
        for member in leaving:
            if member.ask is not None:
                self._dismiss(member)
        for member in staying:
            place = replace(places[member.number], generation=self.generation, skip_sync=skip_sync)
            member.generation, member.rank, member.output.rank = self.generation, place.rank, place.rank
            self._answer(member, place)
        if self.generation > 0 or self.options.verbose:
            say(f"generation {self.generation}: {len(staying)} ranks, {len(new)} of them new.")

    def _dismiss(self, member: Member) -> None:
        member.dismissed = True
        self._refuse(member, f"host {member.host} is no longer in the job.", leave=True)

    def _refuse(self, member: Member, why: str, leave: bool = False) -> None:
        self._answer(member, Place(refusal=why, leave=leave))

    def _answer(self, member: Member, place: Place) -> None:
        assert member.ask is not None
        self._store.set(place_key(member.number, member.ask.number), place.encode())
        member.ask = None

    def _tell(self, member: Member, news: News) -> None:
        self._store.queue_push(news_key(member.number), news.encode())

    def _first_failure(self) -> str:
        return f"The first failure: {self._failures[0]}. " if self._failures else ""

    def _say_who_is_late(self, waiting: list[Member], now: float) -> None:
        self._waits_since = self._waits_since or now
        if now - self._waits_since > _SAY_AFTER_SECONDS:
            self._waits_since = now
            say(f"still waiting for {', '.join(member.name for member in waiting)} to call hvd.init() or to commit.")


def say(text: str) -> None:
    """A line on the driver's own screen."""
    print(f"elastic driver: {text.strip()}", file=sys.stderr, flush=True)


def _hold_store() -> "TCPStore":
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")
