"""The control plane with many ranks: messages, bytes and seconds of a rendezvous, a stop and a hang report.

Claim: messages per rank do not depend on the number of ranks. With 4,096 ranks on one machine of two cores, the
rendezvous takes less than 30 s, the agreement on the last step less than 5 s and a hang report less than 10 s.

Ranks are threads of a few processes, which run the code of real ranks without training: `ranks.store.meet` (challenge
and response at a port derived from the secret, the hub, a connection to a TCP store of torch), the first meeting of all
ranks, `StopAgreement` and `HangSearch`. Rank 0 has a process of its own, as in a job.

- rendezvous: from the start of all ranks until every rank has the hosts of all and a connection to the store.
- stop: every rank is signalled, as Slurm does at the end of an allocation, until every rank knows the last step.
- hang: the deadline of every rank expires, one rank is behind, until every rank has the report.
- silent: the same, but one rank does not answer at all. The deadline for its answer is part of the time.

Clock: time.monotonic of the machine, from a common start to the last rank. Messages and bytes are those of the hub that
a rank sends and receives, with their headers and the handshake, but without what torch sends to its store.
"""

import argparse
import json
import multiprocessing
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: a warning for each host name that is not known
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch asks DNS for the name of every client of its store

import torch.distributed as dist

from tutti.ranks import hang_detection, messages, secret
from tutti.ranks.hub import Position
from tutti.ranks.hub_client import StopAgreement
from tutti.ranks.placement import Placement
from tutti.ranks.process import end_with_parent
from tutti.ranks.secret import SECRET_VARIABLE, make_secret
from tutti.ranks.store import meet
from tutti.runs.step_parts import StepPart

PHASES = ("rendezvous", "stop", "hang", "silent")
BARS = {"rendezvous": 30.0, "stop": 5.0, "hang": 10.0, "silent": 10.0}  # seconds with 4,096 ranks
RANKS_PER_PROCESS = 512
PATIENT_SECONDS = 600.0
STEP = 41
HEADER_BYTES = secret.LENGTH.size + secret.TAG_BYTES
HANDSHAKE_BYTES = 8 + 2 * secret.NONCE_BYTES + 2 * secret.PROOF_BYTES

counts = {"messages": 0, "bytes": 0}
counting = threading.Lock()


def count_messages() -> None:
    """Count what the clients of this process send and receive."""
    send, unpack = messages.Connection.send, secret.Seal.unpack

    def counted_send(self: messages.Connection, kind: str, **content: Any) -> None:
        _count(len(secret.encode(kind, content)))
        send(self, kind, **content)

    def counted_unpack(self: secret.Seal, tag: bytes, content: bytes) -> dict[str, Any]:
        _count(len(content))
        return unpack(self, tag, content)

    messages.Connection.send, secret.Seal.unpack = counted_send, counted_unpack


def _count(size: int) -> None:
    with counting:
        counts["messages"] += 1
        counts["bytes"] += size + HEADER_BYTES


class LightRank:
    """What a rank does besides training."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.store: dist.Store | None = None

    def rendezvous(self) -> None:
        """Find rank 0, connect to the hub and the store, and wait for all ranks."""
        place = self.rank, self.world_size
        meeting = meet(Placement("benchmark", *place, *place, 0, "127.0.0.1", 1, "benchmark"), PATIENT_SECONDS)
        self.hub, self.store = meeting.hub, meeting.store
        self.hosts = self.hub.meet("the start", PATIENT_SECONDS, f"node{self.rank // 8:04d}", "all")
        self.stopping = StopAgreement(self.hub)
        self.hub.on("stop", self.stopping.on_stop)
        self.hub.on("last", self.stopping.on_last)
        assert self.stopping.continues_after(STEP + self.rank % 2 - 1)

    def stop(self) -> None:
        """Be signalled, and agree with all ranks on the last step."""
        begun = STEP + self.rank % 2
        self.stopping.ask("on SIGTERM")
        assert self.stopping._decided.wait(PATIENT_SECONDS)
        assert self.stopping.continues_after(begun) is (begun <= STEP), "the ranks do not agree"

    def hang(self) -> None:
        """Let a deadline expire while one rank is behind, and get the report."""
        assert f"missing rank {self.world_size - 1}" in self._search()

    def silent(self) -> None:
        """The same while one rank does not answer."""
        if self.rank == self.world_size - 1:
            return
        assert f"no answer from rank {self.world_size - 1}" in self._search()

    def between(self, phase: str) -> None:
        """Forget the search before, of which a job has one, and wait for all ranks."""
        if self.hub.hub is not None:
            self.hub.hub._search = self.hub.hub._positions = None
        self.search = hang_detection.HangSearch(self.hub, self.hosts, self._position, 2)
        if self.hub.hub is not None:
            self.hub.hub.conclude = self.search.conclude
        for kind in ("where", "verdict"):
            self.hub._handlers[kind] = []
            self.hub._early.clear()
        if not (phase == "silent" and self.rank == self.world_size - 1):
            self.search.explains = True
            self.hub.on("where", self.search.on_where)
            self.hub.on("verdict", self.search.on_verdict)

    def _search(self) -> str:
        return str(self.search.report(f"step {STEP} did not end within 600 s", hang_detection.ANSWER_SECONDS))

    def _position(self) -> Position:
        part = StepPart.FORWARD if self.rank == self.world_size - 1 else StepPart.BACKWARD
        stack = ("loop.py:41 in train: loss = job.forward_backward(batch)",) * 12
        return Position(self.rank, self.hosts[self.rank], part, STEP, 600.0, stack)


def run_process(ranks: range, world_size: int, go: Any, over: Any, ready: Any, results: Any) -> None:
    """Run some ranks as threads of this process; tell when the last of them has ended each phase."""
    end_with_parent()
    count_messages()
    made = [LightRank(rank, world_size) for rank in ranks]
    threading.stack_size(256 << 10)
    if len(ranks) > 1:  # hundreds of threads that ask for the lock of Python 200 times a second would use all cores
        sys.setswitchinterval(0.5)
    for number, phase in enumerate(PHASES):
        if number:
            for each in made:
                each.between(phase)
        for key in counts:
            counts[key] = 0
        ready.put(("ready", phase, 0.0, {}))
        go[number].wait()
        failures = run_threads([getattr(each, phase) for each in made])
        ended = time.monotonic()
        results.put((failures[0] if failures else "done", phase, ended, dict(counts)))
        over[number].wait()  # no message of this phase is under way
    os._exit(0)


def run_threads(work: list[Callable[[], None]]) -> list[str]:
    """Call each function in a thread; return what went wrong."""
    failures: list[str] = []

    def call(one: Callable[[], None]) -> None:
        try:
            one()
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=call, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def measure(world_size: int) -> dict[str, dict[str, float]]:
    """Run all phases with a number of ranks."""
    os.environ[SECRET_VARIABLE] = make_secret().value.hex()
    context = multiprocessing.get_context("fork")
    go, over = ([context.Event() for _ in PHASES] for _ in range(2))
    ready, results = context.Queue(), context.Queue()
    firsts = range(1, world_size, RANKS_PER_PROCESS)
    others = [range(first, min(first + RANKS_PER_PROCESS, world_size)) for first in firsts]
    processes = [
        context.Process(target=run_process, args=(ranks, world_size, go, over, ready, results), daemon=True)
        for ranks in [range(1), *others]
    ]
    for process in processes:
        process.start()
    try:
        return {
            phase: measure_phase(phase, go[number], over[number], ready, results, processes, world_size)
            for number, phase in enumerate(PHASES)
        }
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def measure_phase(
    phase: str, go: Any, over: Any, ready: Any, results: Any, processes: list[Any], world_size: int
) -> dict[str, float]:
    """Start a phase in all processes at once, and wait for the last."""
    for _ in processes:
        take(ready, "ready", phase, processes)
    begin = time.monotonic()
    go.set()
    told = [take(results, "done", phase, processes) for _ in processes]
    over.set()
    found = {key: sum(counted[key] for _, counted in told) / (world_size - 1) for key in counts}
    if phase == "rendezvous":
        found["bytes"] += HANDSHAKE_BYTES
    return {"seconds": max(ended for ended, _ in told) - begin} | found


def take(results: Any, expected: str, phase: str, processes: list[Any]) -> tuple[float, dict[str, int]]:
    """Return what the next process has told of a phase."""
    deadline = time.monotonic() + PATIENT_SECONDS
    while time.monotonic() < deadline and all(process.is_alive() for process in processes):
        try:
            state, told_phase, ended, counted = results.get(timeout=1.0)
        except queue.Empty:
            continue
        if (state, told_phase) != (expected, phase):
            raise SystemExit(f"{phase}: {state}")
        return ended, counted
    raise SystemExit(f"{phase}: a process has ended, or nothing has happened for {PATIENT_SECONDS:g} s")


def table(found: dict[int, dict[str, dict[str, float]]]) -> Iterator[str]:
    """The measurements as lines of Markdown."""
    titles = ["ranks", *(f"{phase}: {what}" for phase in PHASES for what in ("messages", "bytes", "seconds"))]
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for ranks, phases in found.items():
        cells = [f"{ranks:,}"]
        for phase in PHASES:
            one = phases[phase]
            cells += [f"{one['messages']:.1f}", f"{one['bytes']:,.0f}", f"{one['seconds']:.2f}"]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="64,512,4096", help="numbers of ranks, separated by commas")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    asked = parser.parse_args()
    secret.allow_many_files()
    load = os.getloadavg()[0]
    print(f"{platform.node()}, {os.cpu_count()} cores, load {load:.1f}; all numbers of messages and bytes are per rank")
    found: dict[int, dict[str, dict[str, float]]] = {}
    for ranks in map(int, asked.ranks.split(",")):
        found[ranks] = measure(ranks)
        print(f"{ranks:,} ranks: " + ", ".join(f"{phase} {found[ranks][phase]['seconds']:.2f} s" for phase in PHASES))
    print("\n".join(table(found)))
    if asked.json:
        asked.json.write_text(json.dumps({"load": load, "cores": os.cpu_count(), "ranks": found}, indent=2) + "\n")
    most = max(found)
    slow = [phase for phase in PHASES if most == 4096 and found[most][phase]["seconds"] > BARS[phase]]
    sys.exit(f"slower than the bar: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()
