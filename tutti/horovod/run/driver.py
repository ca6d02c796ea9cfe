"""The driver of an elastic job: starts workers where slots are free, and assigns ranks in each generation.

The driver holds the store of the ranks of every generation, so that any of them may fail. It starts workers, receives
their requests for a rank, and forms the next generation when all running workers have sent one. A worker that fails
ends its generation: the driver notifies the others at once. Hosts that join or leave do not end it: the ranks are
notified when the new workers are ready, and react at their next commit.
"""

import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace

from tutti.horovod.errors import describe_failed_process
from tutti.horovod.run.arguments import ElasticOptions
from tutti.horovod.run.discovery import Discovery, check_numbers, cool_down_of
from tutti.horovod.run.messages import (
    ADDRESS_VARIABLE,
    ELASTIC_VARIABLE,
    WORKER_VARIABLE,
    Assignment,
    Notice,
    RankRequest,
    WorkerServer,
)
from tutti.horovod.run.static_job import interface_environment, position_environment
from tutti.launch.elastic.slots import RankLimits, SlotPool
from tutti.launch.hosts import (
    Candidate,
    Host,
    Slot,
    Ssh,
    address_for,
    assign_ranks,
    fill_hosts,
    is_local,
    listening_address,
    without_launchers,
)
from tutti.launch.supervisor import HostProcess, RankOutput, Stopped, end_processes, stopped_by_signals
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.messages import listen

_NUMBERS = 1000  # of workers, for the width of the names of their output folders
_TICK_SECONDS = 0.05
_REPORT_SECONDS = 60.0  # between two lines that name the workers that are waited for


@dataclass
class Worker:
    """A worker process and what the driver knows about it."""

    number: int
    host: str
    slot: int  # of its host
    process: HostProcess
    output: RankOutput
    started: float
    generation: int = -1  # in which it last had a rank
    rank: int = -1
    request: RankRequest | None = None  # it waits for a rank
    leaving: bool = False  # its slot is no longer in the job
    dismissed: bool = False  # and it was notified

    @property
    def name(self) -> str:
        rank = f"rank {self.rank}" if self.generation >= 0 else "without a rank yet"
        return f"worker {self.number} ({rank}, host {self.host})"

    @property
    def has_not_begun(self) -> bool:
        return self.generation < 0 and self.request is None

    @property
    def has_state(self) -> bool:
        return self.request is not None and self.request.has_state

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.number, self.host, self.slot, self.generation, self.rank, self.has_state)


def start(driver: "Driver", candidate: Candidate, host: Host, expected: Slot) -> Worker:
    """Start a worker, which connects to the driver; it has its expected rank until `init`."""
    number, slot, here, options = candidate.number, candidate.slot, is_local(host.name), driver.options
    address = f"{address_for(host.name, driver.address[0])}:{driver.address[1]}"
    environment = without_launchers(options.environment or os.environ)
    if here:
        environment["OMP_NUM_THREADS"] = str(threads_per_rank(host.slots, environment))
    environment |= interface_environment(options.network_interfaces) | position_environment(expected)
    environment |= {ELASTIC_VARIABLE: "1", ADDRESS_VARIABLE: address, WORKER_VARIABLE: str(number)}
    environment |= options.secret.environment()
    output = RankOutput(number, _NUMBERS, options.output_filename, options.prefix_timestamp)
    ssh = Ssh(options.ssh_port, options.ssh_identity_file)
    process = HostProcess(f"worker {number}", host.name, driver.command, environment, output, ssh)
    if options.verbose:
        print(f"elastic driver: worker {number} is started on {host.name}, slot {slot}.", file=sys.stderr, flush=True)
    return Worker(number, host.name, slot, process, output, time.monotonic())


class JobFailed(Exception):
    """The job cannot continue; the message gives the reason."""


def run_elastic(options: ElasticOptions, command: list[str]) -> int:
    """Run a command on as many ranks as there are slots, until all end with exit code 0; return the exit code."""
    check_numbers(options)
    try:
        with stopped_by_signals():
            driver = Driver(options, command)
            try:
                return driver.run()
            except JobFailed as failure:
                report(f"{failure}\n{driver.first_end}")
                return 1
            finally:
                driver.close()
    except Stopped as stopped:
        report(f"{stopped}: all workers were ended.")
        return 128 + stopped.number


@dataclass
class Driver:
    """The workers of one job, from the first generation to the last."""

    options: ElasticOptions
    command: list[str]
    generation: int = -1
    workers: list[Worker] = field(default_factory=list)
    first_end: str = ""  # of a worker that failed, as Horovod says it
    _failures: list[str] = field(default_factory=list)  # of workers, in the order of time
    _broken: str = ""  # how a worker of this generation failed
    _done: Worker | None = None  # the first worker that ended with exit code 0: no generation follows
    _notified: bool = False  # this generation, of other hosts
    _has_state: bool = False  # some worker has held a state of the training
    _short_since: float | None = None
    _waits_since: float | None = None
    _started: int = 0

    def __post_init__(self) -> None:
        from tutti.launch.elastic.agent import hold_store

        script = self.options.host_discovery_script
        self._discovery = Discovery(script, self.options.slots_per_host or 1) if script else None
        self._hosts: list[Host] = list(self.options.hosts)
        self._limits = RankLimits(self.options.min_np, self.options.max_np)
        self._pool = SlotPool[str](cool_down_of(self.options.cooldown_range))
        names, interfaces = [host.name for host in self._hosts], self.options.network_interfaces
        address = listening_address(names, interfaces, others_may_come=script is not None)
        self._store = hold_store(address)
        self._server = WorkerServer(self.options.secret)
        self.address = address, self._server.start(listen(0, address))  # "" for all addresses

    def run(self) -> int:
        """Run the job to its end; return its exit code."""
        while True:
            now = time.monotonic()
            self._update_hosts()
            self._check_ends(now)
            self._read_requests()
            if self._done is not None:
                code = self._finish()
                if code is not None:
                    return code
            else:
                self._start_workers(now)
                self._notify_of_hosts()
                self._form(now)
            time.sleep(_TICK_SECONDS)

    def close(self) -> None:
        """End all workers; another signal meanwhile kills them."""
        if self._discovery is not None:
            self._discovery.stop()
        end_processes([worker.process for worker in self.workers])
        self._server.close()

    def _current(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.generation == self.generation >= 0]

    # Events.

    def _update_hosts(self) -> None:
        if self._discovery is not None:
            self._hosts = self._discovery.hosts()
        slots = {host.name: host.slots for host in self._hosts}
        for name in self._pool.hosts.keys() - slots.keys():
            self._pool.add(name, name, 0)  # its failures are remembered for when it comes back
        for order, (name, count) in enumerate(slots.items()):
            self._pool.add(name, name, count, order)
        for worker in self.workers:
            worker.leaving = worker.dismissed or worker.slot >= slots.get(worker.host, 0)
            if worker.leaving and worker.request and worker.generation < self.generation:
                self._dismiss(worker)

    def _check_ends(self, now: float) -> None:
        for worker in list(self.workers):
            code = worker.process.poll()
            late = self.options.start_timeout
            if code is None and late and worker.has_not_begun and now > worker.started + late:
                worker.process.kill()
                end_processes([worker.process], reraise=True)
                self._fail(worker, f"has not called hvd.init() within --start-timeout {late:g} s", now, 1)
            elif code == 0 and worker.generation == self.generation:
                self.workers.remove(worker)
                self._done = self._done or worker
            elif code is not None:
                self._fail(worker, worker.process.describe_end(), now, code)

    def _fail(self, worker: Worker, how: str, now: float, code: int) -> None:
        self.workers.remove(worker)
        was_in = worker.generation == self.generation >= 0
        if worker.leaving and not was_in:
            return
        text = f"{worker.name} {how}"
        self._failures.append(text)
        self.first_end = self.first_end or describe_failed_process(f"{worker.host}[{worker.slot}]", code)
        seconds = self._pool.fail(worker.host, now)
        duration = "for good" if seconds == math.inf else f"for {seconds:.3g} s"
        report(f"{text}. No worker is started on {worker.host} {duration}.")
        if was_in:
            self._broken = self._broken or text
            for other in self._current():
                self._notify(other, Notice("lost", self.generation, text))

    def _read_requests(self) -> None:
        while event := self._server.next(0):
            number, message = event
            if message["kind"] == "ping":
                self._server.send([number], "pong")
            for worker in self.workers if message["kind"] == "request" else ():
                if worker.number == number:
                    worker.request = message["request"]
                    self._has_state = self._has_state or worker.has_state

    # Decisions.

    def _finish(self) -> int | None:
        """Wait for the other workers after the first exit code 0; return the exit code when all have ended."""
        assert self._done is not None
        current = self._current() if self.generation >= 0 else self.workers
        end_processes([worker.process for worker in self.workers if worker not in current], reraise=True)
        self.workers = current
        for worker in current:
            if worker.request is not None:
                self._refuse(worker, f"{self._done.name} has ended; no new generation is formed after that.")
        if current:
            return None
        if self._broken or (self.generation < 0 and self._failures):
            failure = self._broken or self._failures[0]
            raise JobFailed(f"the job has failed: {failure}, while other workers ended with exit code 0.")
        return 0

    def _start_workers(self, now: float) -> None:
        """Start a worker on every free slot, up to --max-np."""
        options = self.options
        if options.reset_limit is not None and self.generation >= options.reset_limit:
            return  # they could never have a rank
        usable = self._pool.usable(now)
        enough = self._limits.world_size(sum(usable.values())) > 0
        if not self.workers and (self.generation >= 0 or not enough):
            return
        taken = {(worker.host, worker.slot) for worker in self.workers}
        free = {name: [n for n in range(slots) if (name, n) not in taken] for name, slots in usable.items()}
        left = (options.max_np or sys.maxsize) - sum(not worker.leaving for worker in self.workers)
        hosts = {host.name: host for host in self._hosts}
        filled = fill_hosts({name: len(slots) for name, slots in free.items()}, max(left, 0))
        places = [(name, slot) for name, count in filled.items() for slot in free[name][:count]]
        new = [Candidate(number, *place) for number, place in enumerate(places, self._started)]
        expected = assign_ranks([*(worker.candidate for worker in self.workers if not worker.leaving), *new])
        for each in new:
            self.workers.append(start(self, each, hosts[each.host], expected[each.number]))
        self._started += len(new)

    def _notify_of_hosts(self) -> None:
        """Notify a generation once: some workers must leave it, or all new workers are ready to join."""
        current = self._current()
        if self._notified or not current or self._broken:
            return
        new = [worker for worker in self.workers if worker not in current and not worker.leaving]
        ready = bool(new) and all(worker.request for worker in new)
        leaving = any(worker.leaving for worker in current)
        if ready or leaving:
            self._notified = True
            for worker in current:
                self._notify(worker, Notice("hosts", self.generation, skip_sync=not ready))

    def _form(self, now: float) -> None:
        """Form a generation when a worker of the last one requests it, all have sent a request, and they are enough."""
        current = self._current()
        if self.generation >= 0 and not current:
            raise JobFailed(
                f"the job has failed: no worker with the state of the training is left. {self._first_failure()}"
            )
        if self.generation < 0 and not self.workers and self._failures:
            raise JobFailed(f"the job has failed before it began: all workers have ended. {self._first_failure()}")
        if self.generation >= 0 and not any(worker.request for worker in current):
            return
        self._check_reset_limit()
        staying = [worker for worker in self.workers if not worker.leaving]
        if not self._limits.world_size(len(staying)):
            self._check_shortage(len(staying), now)
            return
        self._short_since = None
        if waiting := [worker for worker in staying if worker.request is None]:
            self._report_late(waiting, now)
            return
        self._waits_since = None
        self._check_state(staying)
        self._assign(staying, [worker for worker in self.workers if worker.leaving])

    def _check_shortage(self, count: int, now: float) -> None:
        """Report that there are too few slots; fail when no more can be added, or after the timeout."""
        options = self.options
        if self._short_since is None:
            self._short_since = now
            report(f"{count} slots, fewer than --min-np {options.min_np}: waiting for more.")
        final = self._discovery is None and options.cooldown_range is None
        if final or now - self._short_since > options.elastic_timeout:
            hosts = ", ".join(f"{host.name}:{host.slots}" for host in self._hosts) or "none"
            cooling = ", ".join(self._pool.cooling_hosts(now)) or "none"
            waited = "and no more can come" if final else f"for --elastic-timeout {options.elastic_timeout:g} s"
            raise JobFailed(
                f"{count} slots could be used {waited}: expected {options.min_np} or more (--min-np). "
                f"Hosts: {hosts}; not used after failures: {cooling}. {self._first_failure()}"
                "Give more hosts, lower --min-np, or let failed hosts be used again with --blacklist-cooldown-range."
            )

    def _check_reset_limit(self) -> None:
        limit = self.options.reset_limit
        if limit is not None and self.generation >= limit:
            raise JobFailed(
                f"the job would be reset for the {_ordinal(self.generation + 1)} time, and --reset-limit is {limit}. "
                f"{self._first_failure()}"
            )

    def _check_state(self, staying: list[Worker]) -> None:
        """Fail when no survivor holds the state of the training, once a worker did."""
        survivors = [worker for worker in staying if worker.generation == self.generation]
        has_state = any(worker.has_state for worker in survivors)
        if self.generation >= 0 and (not survivors or (self._has_state and not has_state)):
            raise JobFailed(
                "the job has failed: every worker with the state of the training was lost or has left. "
                f"{self._first_failure()}"
            )

    def _assign(self, staying: list[Worker], leaving: list[Worker]) -> None:
        new = [worker for worker in staying if worker.generation < 0 or worker.generation < self.generation]
        skip_sync = not new and all(worker.request is not None and worker.request.skip_sync for worker in staying)
        slots = assign_ranks([worker.candidate for worker in staying])
        self.generation += 1
        self._broken, self._notified = "", False
        for worker in leaving:
            if worker.request is not None:
                self._dismiss(worker)
        others = [worker.host for worker in staying if not is_local(worker.host)]
        for worker in staying:
            slot = slots[worker.number]
            address = address_for(others[0], self.address[0]) if others and is_local(worker.host) else ""
            worker.generation, worker.rank, worker.output.rank = self.generation, slot.rank, slot.rank
            numbers = slot.rank, slot.size, slot.local_rank, slot.local_size, slot.node_rank
            self._answer(worker, Assignment(self.generation, *numbers, self._store.port, address, skip_sync))
        if self.generation > 0 or self.options.verbose:
            report(f"generation {self.generation}: {len(staying)} ranks, {len(new)} of them new.")

    def _dismiss(self, worker: Worker) -> None:
        worker.dismissed = True
        self._refuse(worker, f"host {worker.host} is no longer in the job.", leave=True)

    def _refuse(self, worker: Worker, why: str, leave: bool = False) -> None:
        self._answer(worker, Assignment(refusal=why, leave=leave))

    def _answer(self, worker: Worker, assignment: Assignment) -> None:
        assert worker.request is not None
        answer = replace(assignment, request=worker.request.number)
        self._server.send([worker.number], "assignment", **asdict(answer))
        worker.request = None

    def _notify(self, worker: Worker, notice: Notice) -> None:
        self._server.send([worker.number], "notice", **asdict(notice))

    def _first_failure(self) -> str:
        return f"The first failure: {self._failures[0]}. " if self._failures else ""

    def _report_late(self, waiting: list[Worker], now: float) -> None:
        self._waits_since = self._waits_since or now
        if now - self._waits_since > _REPORT_SECONDS:
            self._waits_since = now
            report(f"still waiting for {', '.join(worker.name for worker in waiting)} to call hvd.init() or to commit.")


def report(text: str) -> None:
    """Print a line of the driver."""
    print(f"elastic driver: {text.strip()}", file=sys.stderr, flush=True)


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")
