"""The hub of a job: every rank has one connection to rank 0, over which ranks wait for each other, stop and search.

Whatever is agreed costs a rank a fixed number of messages, however many ranks there are. A rank that ends closes its
connection, and the others learn that at once. Nothing here uses collectives, which may be what hangs.
"""

import itertools
import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tutti import units
from tutti.ranks.messages import Event, MessageServer, Peer
from tutti.ranks.secret import Secret
from tutti.runs.step_parts import StepPart

Returns = Literal["nothing", "all", "first", "any", "next", "some"]  # which items of a meeting a rank gets

RANKS_PER_SECOND = 1000  # that a hub serves at least, on a busy host
LOST_SECONDS = 5.0  # in which the main threads of ranks notice a lost rank themselves
_MOST_SOME = 16
_SLICE_BYTES = 4 << 20  # of the items of a meeting in one message


def allow_seconds(base_seconds: float, world_size: int) -> float:
    """Return the deadline of an answer that takes so long with few ranks, for this number of ranks."""
    return base_seconds + world_size / RANKS_PER_SECOND


class Hub:
    """What rank 0 knows of all ranks; `send(ranks, kind, content)` reaches some of them, or all with None."""

    def __init__(self, world_size: int, send: Callable[[Iterable[int] | None, str, dict[str, Any]], None]) -> None:
        self.world_size = world_size
        self.hosts: dict[int, str] = {}
        self._on_engine: Callable[[int, dict[str, Any]], bool] = lambda rank, message: False
        self._on_gone: Callable[[int], None] = lambda rank: None
        self._early: list[tuple[int, dict[str, Any]]] = []  # messages to an engine that has not started yet
        self.conclude: Callable[[str, dict[int, Any]], dict[str, Any]] | None = None  # what a search has found
        self.left: set[int] = set()  # ranks that have said that they end
        self.lost: set[int] = set()  # ranks whose connection has ended without that
        self.send = send
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._meetings: dict[int, dict[int, Any]] = {}
        self._failed: dict[int, dict[str, Any]] = {}  # meetings that were given up
        self._stopped: set[int] = set()  # runs: a process may have several, one after the other
        self._begun: dict[int, dict[int, int]] = {}  # steps of ranks, by runs that stop
        self._has_failure = False
        self._search: tuple[str, int] | None = None  # what is searched for, and who asked first
        self._positions: dict[int, Any] | None = None
        self._timers: list[threading.Timer] = []
        self._takes = {
            "arrive": self._on_arrive,
            "deadline": self._on_deadline,
            "stop": self._on_stop,
            "begun": self._on_begun,
            "failed": self._on_failed,
            "search": self._on_search,
            "here": self._on_here,
            "leave": self._on_leave,
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        return (*self._takes, "engine")

    def join(self, rank: int, host: str) -> str:
        """Take in a rank; return why it is refused, or an empty string."""
        with self._lock:
            if not 0 <= rank < self.world_size:
                return f"rank {rank} of {self.world_size}"
            if rank in self.hosts:
                there = "has left" if rank in self.left else "is there already"
                return f"rank {rank} {there}, from host {self.hosts[rank]}"
            self.hosts[rank] = host
            return ""

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Handle the message of a rank; any thread may call this."""
        with self._lock:
            if message["kind"] != "engine":
                self._takes[message["kind"]](rank, message)
            elif not self._on_engine(rank, message):
                self._early.append((rank, message))

    def serve_engine(self, take: Callable[[int, dict[str, Any]], bool], gone: Callable[[int], None]) -> None:
        """Hand messages to an engine, also those that came before it; it returns whether a message was for it."""
        with self._lock:
            self._on_engine, self._on_gone = take, gone
            early, self._early = self._early, []
            for rank, message in early:
                self.receive(rank, message)
            for rank in self.lost:
                gone(rank)

    def lose(self, rank: int) -> None:
        """Note that the connection of a rank has ended."""
        with self._lock:
            if rank not in self.left:
                self.lost.add(rank)
                self.send(None, "lost", {"rank": rank, "host": self.hosts[rank]})
                if self.conclude is not None and self._search is None:
                    self._later(LOST_SECONDS, lambda: self._find_lost(rank))
            self._gone(rank)

    def wait_until_left(self, seconds: float) -> None:
        """Wait until the other ranks have left: what they wait for comes from here."""
        with self._changed:
            self._changed.wait_for(lambda: self.hosts.keys() <= self.left | self.lost | {0}, seconds)

    def begin_run(self) -> None:
        """Forget what an earlier run in these processes has failed of and searched for."""
        with self._lock:
            self._has_failure, self._search, self._positions = False, None, None

    def close(self) -> None:
        """Give up what is under way."""
        for timer in self._timers:
            timer.cancel()

    def _gone(self, rank: int) -> None:
        self._on_gone(rank)
        for number in list(self._meetings):
            self._check(number)
        self._check_begun()
        self._check_positions()
        self._changed.notify_all()

    def _on_leave(self, rank: int, message: dict[str, Any]) -> None:
        self.left.add(rank)
        self._gone(rank)

    # Meetings: every rank arrives, and gets items that the ranks brought.

    def _on_arrive(self, rank: int, message: dict[str, Any]) -> None:
        number = int(message["number"])
        if number in self._failed:
            self.send([rank], "absent", self._failed[number])
            return
        meeting = self._meetings.setdefault(number, {})
        meeting[rank] = message.get("item")
        if len(meeting) == self.world_size:
            del self._meetings[number]
            self._hand_out(number, message["returns"], meeting)
        else:
            self._check(number)

    def _on_deadline(self, rank: int, message: dict[str, Any]) -> None:
        number = int(message["number"])
        if number in self._meetings:
            self._give_up(number, [])

    def _check(self, number: int) -> None:
        """Give up a meeting to which a rank that has ended will not come."""
        if gone := sorted((self.left | self.lost).difference(self._meetings[number])):
            self._give_up(number, gone)

    def _give_up(self, number: int, gone: Sequence[int]) -> None:
        arrived = sorted(self._meetings.pop(number))
        missing = sorted(set(range(self.world_size)).difference(arrived))
        told = {"number": number, "missing": units.ranks(missing), "arrived": units.ranks(arrived)}
        told["gone"] = f"{units.ranks(gone)} on host {self.hosts[gone[0]]}" if gone else ""
        told["rank"] = (gone or missing)[0]
        self._failed[number] = told
        self.send(arrived, "absent", told)

    def _hand_out(self, number: int, returns: Returns, items: dict[int, Any]) -> None:
        if returns == "next":
            for rank in items:
                self._pass([rank], number, [items[(rank + 1) % self.world_size]])
        elif returns == "all":
            runs = itertools.groupby(items[rank] for rank in range(self.world_size))
            self._pass(None, number, [[len(list(same)), item] for item, same in runs])  # often the same on many ranks
        elif returns == "some":
            found = [[rank, items[rank]] for rank in sorted(items) if items[rank] is not None]
            self._pass(None, number, [len(found), *found[:_MOST_SOME]])
        elif returns == "any":
            self._pass(None, number, [next((items[rank] for rank in sorted(items) if items[rank] is not None), None)])
        else:
            self._pass(None, number, [items[0]] if returns == "first" else [])

    def _pass(self, ranks: Iterable[int] | None, number: int, items: list[Any]) -> None:
        """Let ranks pass a meeting; many or large items go in several messages."""
        size, part = 0, []
        for item in items:
            part.append(item)
            size += len(json.dumps(item)) if len(items) > 1 else 0
            if size > _SLICE_BYTES:
                self.send(ranks, "passes", {"number": number, "items": part})
                size, part = 0, []
        self.send(ranks, "passed", {"number": number, "items": part})

    # The agreement on the last step.

    def _on_stop(self, rank: int, message: dict[str, Any]) -> None:
        run = int(message["run"])
        if run not in self._stopped:
            self._stopped.add(run)
            self.send(None, "stop", {"reason": message["reason"], "run": run})

    def _on_begun(self, rank: int, message: dict[str, Any]) -> None:
        self._begun.setdefault(int(message["run"]), {})[rank] = int(message["step"])
        self._check_begun()

    def _check_begun(self) -> None:
        for run, steps in list(self._begun.items()):
            if len(steps.keys() | self.left) == self.world_size:
                self.send(None, "last", {"step": max(steps.values()), "run": run})
                del self._begun[run]

    # Failures, and the search for the ranks that the others wait for.

    def _on_failed(self, rank: int, message: dict[str, Any]) -> None:
        if not self._has_failure:
            self._has_failure = True
            told = {name: message[name] for name in ("text", "exit_code", "cause")}
            self.send(None, "failed", {"rank": rank, "host": self.hosts[rank]} | told)

    def _on_search(self, rank: int, message: dict[str, Any]) -> None:
        if self._search is None:
            self._search, self._positions = (str(message["what"]), rank), {}
            self._later(allow_seconds(float(message["seconds"]), self.world_size), self._end_search)
            self.send(None, "where", {})

    def _find_lost(self, rank: int) -> None:
        what = f"rank {rank} on host {self.hosts[rank]} has ended"
        with self._lock:
            self._on_search(0, {"what": what, "seconds": LOST_SECONDS})

    def _on_here(self, rank: int, message: dict[str, Any]) -> None:
        if self._positions is not None:
            self._positions[rank] = message["position"]
            self._check_positions()

    def _check_positions(self) -> None:
        positions = self._positions
        if positions is not None and len(positions.keys() | self.left | self.lost) == self.world_size:
            self._later(0.0, self._end_search)

    def _end_search(self) -> None:
        """Conclude from the positions that ranks have reported; in a thread, since files are written."""
        with self._lock:
            if self._search is None or self._positions is None:
                return
            (what, reporter), positions, self._positions = self._search, self._positions, None
        if self.conclude is not None:
            self.send(None, "verdict", self.conclude(what, positions) | {"reporter": reporter})

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, work)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


class HubServer(MessageServer):
    """The connections of all ranks but rank 0, which is in the same process."""

    def __init__(self, secret: Secret, world_size: int, store_port: int = 0) -> None:
        super().__init__(secret)
        self._store_port = store_port
        self.hub = Hub(world_size, self._distribute)
        self.deliver_to_first: Callable[[dict[str, Any]], None] | None = None
        self.kinds = self.hub.kinds

    def admit(self, arrival: int, message: dict[str, Any], peer: Peer) -> Event | None:
        match message:
            case {"kind": "join", "rank": int(rank), "host": str(host), "world_size": int(world_size)}:
                why = f"expected {self.hub.world_size} ranks" if world_size != self.hub.world_size else ""
                why = why or self.hub.join(rank, host)
            case _:
                rank, why = -1, "another version of tutti"
        self.reply(peer, "refused" if why else "welcome", why=why, store_port=self._store_port)
        return None if why else (rank, message)

    def on_message(self, number: int, message: dict[str, Any]) -> None:
        if message["kind"] == "disconnected":
            self.hub.lose(number)
        elif message["kind"] != "join":
            self.hub.receive(number, message)

    def _distribute(self, ranks: Iterable[int] | None, kind: str, content: dict[str, Any]) -> None:
        others = range(1, self.hub.world_size) if ranks is None else [rank for rank in ranks if rank]
        self.send(others, kind, **content)
        if self.deliver_to_first is not None and (ranks is None or 0 in ranks):
            self.deliver_to_first({"kind": kind} | content)


_MAX_STACKS = 4
_STACK_DEPTH = 12  # calls of a stack
_TORCH_CALLS = ("_wrapped_call_impl", "_call_impl", "_run_ddp_forward")  # in every pass through a module


_NAMES = {
    StepPart.DATA: "waiting for its batch",
    StepPart.FORWARD: "in the forward pass",
    StepPart.BACKWARD: "in the backward pass, where gradients are averaged,",
    StepPart.OPTIMIZER: "in the optimizer",
    StepPart.LOGGING: "at the means of the log window",
    StepPart.VALIDATION: "in validation",
    StepPart.CHECKPOINT: "at the checkpoint",
}


@dataclass(frozen=True)
class Position:
    """What the main thread of a rank is doing, reported by another thread of that rank."""

    rank: int
    host: str
    phase: StepPart
    step: int  # the current step, counted from 1
    seconds: float  # since the phase began
    stack: tuple[str, ...]  # Python calls, innermost last

    @property
    def place(self) -> tuple[int, int]:
        """Progress, comparable between ranks."""
        return self.step, self.phase.order

    def plain(self) -> list[Any]:
        """Return what another rank cannot know of this one."""
        return [self.phase.value, self.step, self.seconds, list(self.stack)]

    @classmethod
    def from_plain(cls, rank: int, host: str, plain: list[Any]) -> "Position":
        """Return the position that a rank has sent."""
        phase, step, seconds, stack = plain
        return cls(rank, host, StepPart(phase), int(step), float(seconds), tuple(map(str, stack)))

    def sentence(self) -> str:
        return f"{_NAMES[self.phase]} of step {self.step:,} for {self.seconds:.0f} s"


@dataclass(frozen=True)
class HangFinding:
    """The result of a hang search."""

    text: str
    arrived: tuple[int, ...]
    behind: tuple[int, ...]  # ranks that answer, but have not reached the position of the others
    silent: tuple[int, ...]  # ranks that do not answer


def find_missing(answers: Sequence[Position], hosts: Sequence[str], what: str) -> HangFinding:
    """Find which ranks have arrived where the ranks wait, which are behind and where, and which do not answer."""
    here = sorted(answers, key=lambda each: each.rank)
    known = {each.rank for each in here}
    silent = tuple(rank for rank in range(len(hosts)) if rank not in known)
    furthest = max((each.place for each in here), default=(0, 0))
    arrived = [each for each in here if each.place == furthest]
    behind = [each for each in here if each.place != furthest]
    lines = [_headline(what, behind, silent, hosts)]
    if arrived:
        lines.append(f"{units.ranks([e.rank for e in arrived])} arrived: {arrived[0].sentence()}")
    for each in behind[:_MAX_STACKS]:
        lines += [f"rank {each.rank} on host {each.host} is {each.sentence()}:", *_quoted(each.stack)]
    if silent:
        shown = ", ".join(f"{rank} on host {hosts[rank]}" for rank in silent[:16])
        lines.append(f"no answer from rank {shown}: the process or its host has ended, is suspended, or is unreachable")
    if not behind and not silent:
        lines += [f"rank {arrived[0].rank} on host {arrived[0].host} waits with the stack:", *_quoted(arrived[0].stack)]
    return HangFinding(
        "\n".join(lines), tuple(each.rank for each in arrived), tuple(each.rank for each in behind), silent
    )


def stack_of(thread: int) -> tuple[str, ...]:
    """Return the Python calls of a thread as lines, innermost last."""
    frame = sys._current_frames().get(thread)
    calls = [call for call in traceback.extract_stack(frame) if call.name not in _TORCH_CALLS] if frame else []
    return tuple(
        f"{Path(call.filename).name}:{call.lineno} in {call.name}: {call.line or ''}" for call in calls[-_STACK_DEPTH:]
    )


def _headline(what: str, behind: Sequence[Position], silent: Sequence[int], hosts: Sequence[str]) -> str:
    missing = sorted({*(each.rank for each in behind), *silent})
    if not missing:
        return (
            f"{what}: all ranks are at the same position and wait for each other. "
            "The network between them may be down: run tutti doctor on the same hosts."
        )
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in missing[:16]))
    return f"{what}: missing {units.ranks(missing)} on host {where}."


def _quoted(stack: Sequence[str]) -> list[str]:
    return [f"  | {line}" for line in stack]
