"""The first launcher of an elastic job: hosts join and leave, ranks are lost, and training continues in rounds.

In a round all ranks train together. It ends when a rank is lost, when the ranks have saved because more of them could
take part, or when training is complete. The next round resumes from the newest checkpoint.
"""

import platform
import re
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tutti.errors import Cause, Interrupted, RankLost
from tutti.launch.cluster.status import Progress
from tutti.launch.elastic.member import Welcome
from tutti.launch.elastic.slots import CoolDown, RankEnd, RankLimits, Round, RoundEnd, Rounds, RoundShare, SlotPool
from tutti.launch.hosts import LOOPBACK
from tutti.ranks.failures import Failure, first_cause
from tutti.ranks.messages import Event, MessageServer, Peer
from tutti.ranks.process import launch_line
from tutti.ranks.secret import Secret
from tutti.runs.files import to_dataclass
from tutti.runs.folder import RunFolder
from tutti.runs.listing import read_state

_TICK_SECONDS = 0.2
_FIRST_HOSTS_SECONDS = 10.0  # for hosts that were started together with this one
_REPORT_SECONDS = 3.0  # before the screen shows that there are too few ranks
_SETTLE_SECONDS = 1.0  # in which hosts that join one after the other are collected
_BROKEN_SECONDS = 5.0  # in which ranks end by themselves when others are lost
_KILL_SECONDS = 10.0  # a rank that waits for one on a host that has lost its network does not notice
_LOSSES_ALLOWED = 5  # of the ranks of one host
_MAX_FUTILE_ROUNDS = 3  # rounds in a row that may end by a loss without a new checkpoint
_MAX_CHANGES = 20  # that one line on the screen names
_MAX_HOSTS = 4096
_MAX_SLOTS = 1024  # of one host
LAST = 1_000_000  # the order of hosts that join later: their ranks come after all others
_HOST_NAME = re.compile(r"[\w.:-]{1,255}")


@dataclass(frozen=True)
class ElasticTerms:
    """The options of an elastic job."""

    min_ranks: int
    max_ranks: int
    parts: int  # into which a global batch can be divided
    wait_seconds: float = 300.0  # with too few ranks
    pause_seconds: float = 10.0  # before the slot of a lost rank is used again
    first_hosts: int = 1  # started together


class HostServer(MessageServer):
    """Admits hosts that would run what the job runs; each has the number of its arrival."""

    kinds = ("ended", "leave")

    def __init__(self, recipe: str, overrides: Sequence[str], version: str, secret: Secret) -> None:
        super().__init__(secret)
        self.names: dict[int, str] = {}  # until they have disconnected
        self.reached_at: dict[int, str] = {}  # the address of this host to which each has connected
        self._recipe = recipe
        self._overrides = list(overrides)
        self._version = version

    def admit(self, arrival: int, message: dict[str, Any], peer: Peer) -> Event | None:
        """Admit a host with a valid offer; another one is told what is wrong with its own."""
        if message["kind"] != "join":
            return None
        if (refusal := self._refusal(message)) is not None:
            self.reply(peer, "end", code=2, text=refusal)
            return None
        self.names[arrival] = message["host"]
        self.reached_at[arrival] = peer.connection.getsockname()[0].removeprefix("::ffff:")
        return arrival, {"kind": "join", "slots": message["slots"], "order": message["order"]}

    def on_message(self, number: int, message: dict[str, Any]) -> None:
        """Add only complete messages to the events; the ValueError of another one disconnects its host."""
        if message["kind"] == "ended":
            report = {key: value for key, value in message.items() if key != "kind"}
            message = {"kind": "ended", "end": to_dataclass(report, RoundEnd)}
        elif message["kind"] == "leave":
            message = {"kind": "leave"}
        super().on_message(number, message)

    def _refusal(self, message: dict[str, Any]) -> str | None:
        match message:
            case {"version": version} if version != self._version:
                return f"this host has tutti {version!s:.50}, the job {self._version}: expected the same on all hosts."
            case {"recipe": recipe} if recipe != self._recipe:
                return f"the job here trains {self._recipe!r}, not {recipe!r:.200}. Join it with its own recipe."
            case {"overrides": overrides} if overrides != self._overrides:
                own = " ".join(self._overrides) or "no overrides"
                return f"the job here was resumed with {own}: expected the same on all hosts, not {overrides!r:.200}."
            case {"slots": int(slots)} if not 1 <= slots <= _MAX_SLOTS:
                return f"this host offers {slots} slots: expected 1 to {_MAX_SLOTS}. Give another number with -n."
            case {"order": int(order)} if not 0 <= order <= LAST:
                return f"this host asks for position {order} among the hosts: expected 0 to {LAST}."
            case _ if len(self.names) >= _MAX_HOSTS:
                return f"the job here has {_MAX_HOSTS} hosts already, the most that it takes."
            case {"host": str(name), "slots": int(), "order": int()} if _HOST_NAME.fullmatch(name):
                return None
        return "this host's request to join is not complete: expected its name, slots and order."


@dataclass
class _Current:
    """The round that is under way."""

    round: Round
    store: Any  # of its ranks; it ends with the last reference
    before: Progress
    running: set[int]  # hosts whose ranks have not ended
    ended: list[tuple[int, RankEnd]] = field(default_factory=list)  # ranks that did not complete, with their hosts
    lost: list[str] = field(default_factory=list)  # ranks that were lost with their host
    is_stopping: bool = False
    broken_since: float | None = None

    def note_loss(self) -> None:
        self.broken_since = self.broken_since or time.monotonic()


class Leader:
    """Decides what all hosts do; `run` returns when the job is over."""

    def __init__(
        self,
        terms: ElasticTerms,
        folder: RunFolder,
        server: HostServer,
        report: Callable[[str], None],
        address: str = "",
    ) -> None:
        """Lead the hosts of a server, which listens at this address, or at all of this host."""
        self._terms = terms
        self._folder = folder
        self._server = server
        self._address = address
        self._welcome = Welcome(str(folder.path.resolve()), launch_line(), secrets.token_hex(16))
        self._report = report
        limits = RankLimits(terms.min_ranks, terms.max_ranks, terms.parts)
        self._pool = SlotPool[int](CoolDown(terms.pause_seconds, failures_allowed=_LOSSES_ALLOWED))
        self._rounds = Rounds(limits, self._pool)
        self._current: _Current | None = None
        self._changes: deque[str] = deque(maxlen=_MAX_CHANGES)  # since the last round began
        self._lost_rank: int | None = None  # of the last round that has lost one
        self._leaving: set[int] = set()
        self._signal: signal.Signals | None = None
        self._short_since: float | None = None
        self._short_reported = False
        self._futile_rounds = 0
        self._start = self._last_join = time.monotonic()
        self._over = False
        self._failure: Failure | None = None

    def stop(self, number: int, _: object = None) -> None:
        """Have all ranks save and the job end; the second call ends it at once. A signal handler."""
        self._server.put("signal", number=number)

    def run(self) -> Failure | None:
        """Lead the job to its end; return why it ended before it was complete."""
        while not self._over:
            if event := self._server.next(_TICK_SECONDS):
                host, message = event
                getattr(self, f"_on_{message.pop('kind')}")(host, **message)
            self._act(time.monotonic())
        return self._failure

    # Messages of hosts.

    def _on_join(self, host: int, slots: int, order: int) -> None:
        self._pool.add(host, self._server.names[host], slots, order)
        self._last_join = time.monotonic()
        self._server.send([host], "welcome", welcome=asdict(self._welcome))
        if self._rounds.count:
            self._changes.append(f"host {self._server.names[host]} has joined")

    def _on_ended(self, host: int, end: RoundEnd) -> None:
        current = self._current
        if current and end.round == current.round.number and host in current.running:
            current.running.remove(host)
            current.ended += [(host, rank) for rank in end.ranks]
            if end.ranks:
                current.note_loss()

    def _on_leave(self, host: int) -> None:
        if host not in self._leaving:
            self._leaving.add(host)
            self._changes.append(f"host {self._server.names[host]} has left")
            self._pool.remove(host)

    def _on_disconnected(self, host: int) -> None:
        self._pool.remove(host)
        self._leaving.discard(host)
        current = self._current
        if current and host in current.running:
            current.running.remove(host)
            ranks = ", ".join(map(str, current.round.ranks_of(host)))
            self._lost_rank = next(iter(current.round.ranks_of(host)), None)
            current.lost.append(f"{ranks} on host {self._server.names[host]}, which was lost")
            current.note_loss()
        for known in (self._server.names, self._server.reached_at):
            known.pop(host, None)

    def _on_signal(self, _: int, number: int) -> None:
        if self._current and self._signal:
            self._server.send(self._current.running, "kill")
        elif self._current:
            self._report("stopping: the ranks save first; a second signal ends them at once")
        self._signal = self._signal or signal.Signals(number)

    # Decisions.

    def _act(self, now: float) -> None:
        current = self._current
        free = self._leaving - (current.running if current else set())
        self._server.send(free, "end", code=0, text="")
        self._leaving -= free
        if current is None and self._signal:
            self._end(self._unsaved(self._signal))
        elif current is None:
            self._begin_or_wait(now)
        elif not current.running:
            self._conclude(current, now)
        elif current.broken_since is not None:
            if now - current.broken_since > _BROKEN_SECONDS:
                current.store = None  # ranks that wait for the lost ones at the store end, too
            if now - current.broken_since > _KILL_SECONDS:
                self._server.send(current.running, "kill")
        elif not current.is_stopping and self._wants_to_stop(current, now):
            current.is_stopping = True
            self._server.send(current.running, "stop")

    def _wants_to_stop(self, current: _Current, now: float) -> bool:
        """A round ends for a signal, for a host that leaves, and for more ranks once it has trained."""
        if self._signal or self._leaving & current.running:
            return True
        grows = self._rounds.grows(current.round, now) and now - self._last_join > _SETTLE_SECONDS
        return grows and current.before.has_trained()

    def _begin_or_wait(self, now: float) -> None:
        complete = len(self._pool.hosts) >= self._terms.first_hosts or now - self._start > _FIRST_HOSTS_SECONDS
        new = self._rounds.next_round(now) if complete or self._rounds.count else None
        if new:
            self._begin(new)
            return
        self._short_since = self._short_since or now
        seconds = now - self._short_since
        if not self._short_reported and (self._rounds.count or seconds > _REPORT_SECONDS):
            self._short_reported = True
            self._report(f"{self._shortage(now)}: waiting {self._terms.wait_seconds:g} s for more")
        if seconds > self._terms.wait_seconds:
            waited = f"{self._shortage(now)}, for {self._terms.wait_seconds:g} s."
            failure = self._own_failure(f"{waited} Resume later with: {self._resume_command()}", RankLost.exit_code)
            self._end(failure)

    def _begin(self, new: Round) -> None:
        from tutti.launch.elastic.agent import hold_store

        waiting = {0: "", 1: ", 1 more waits as a spare"}.get(new.spares, f", {new.spares} more wait as spares")
        reasons = f" ({'; '.join(self._changes)})" if self._changes else ""
        if new.number > 1 or waiting:
            self._report(f"now on {_ranks(new.world_size)}{waiting}{reasons}")
        self._changes.clear()
        self._short_since, self._short_reported = None, False
        others = [host for host in new.shares if self._pool.hosts[host].order > 0]
        store = hold_store(self._address or ("" if others else LOOPBACK))
        address = self._server.reached_at[others[0]] if others else ""
        self._current = _Current(new, store, Progress.now(self._folder), set(new.shares))
        for index, (host, ranks) in enumerate(new.shares.items()):
            first = new.ranks_of(host).start
            own = "" if host in others else address
            share = RoundShare(new.number, first, ranks, new.world_size, index, len(new.shares), store.port, own)
            self._server.send([host], "round", share=asdict(share))

    def _conclude(self, current: _Current, now: float) -> None:
        """End the job, or let another round follow, when all ranks of a round have ended."""
        self._current = None
        killed = [(host, ended.failure) for host, ended in current.ended if ended.killed]
        cause = first_cause([ended.failure for _, ended in current.ended])
        has_stopped = cause is not None and cause.exit_code == Interrupted.exit_code
        if read_state(self._folder) == "finished":
            self._end(None)
        elif self._signal:
            self._end(cause if has_stopped else self._unsaved(self._signal))
        elif killed or current.lost:
            self._cool_down(current, killed, now)
        elif cause and not cause.consequence and not (current.is_stopping and has_stopped):
            self._end(cause)
        elif not current.is_stopping:
            text = cause.text.split("\n")[0] if cause else "all ranks ended before the run was complete"
            self._count_loss(current, text)

    def _cool_down(self, current: _Current, killed: list[tuple[int, Failure]], now: float) -> None:
        """Leave the slots of ranks that were lost unused for a while."""
        lost = list(current.lost)
        self._lost_rank = killed[0][1].rank if killed else self._lost_rank
        for host, failure in killed:
            given_up = ""
            if host in self._pool.hosts and not self._rounds.lose(host, now):
                given_up = ", too often to be restarted"
            lost.append(f"{failure.rank} on host {failure.host}, {failure.text}{given_up}")
        self._count_loss(current, f"{'ranks' if len(lost) > 1 else 'rank'} lost: {'; '.join(lost)}")

    def _count_loss(self, current: _Current, text: str) -> None:
        """End a job that loses ranks again and again without a new checkpoint."""
        self._changes.append(text)
        self._futile_rounds = 0 if current.before.has_saved() else self._futile_rounds + 1
        if self._futile_rounds >= _MAX_FUTILE_ROUNDS:
            ended = f"{_MAX_FUTILE_ROUNDS} rounds in a row have ended without a new checkpoint"
            self._end(self._own_failure(f"{ended}, the last one by this: {text}", RankLost.exit_code))

    def _end(self, failure: Failure | None) -> None:
        self._over, self._failure = True, failure
        code, text = (failure.exit_code, failure.text) if failure else (0, "")
        self._server.send_all("end", code=code, text=text)

    # Texts.

    def _shortage(self, now: float) -> str:
        present, lost = self._rounds.present(now), f" ({'; '.join(self._changes)})" if self._changes else ""
        usable = "" if present < self._terms.min_ranks else ", over which the global batch does not split"
        return f"{_ranks(present)} here{usable}, at least {self._terms.min_ranks} needed{lost}"

    def _unsaved(self, number: signal.Signals) -> Failure:
        text = f"stopped on {number.name} before anything more was saved. Resume with: {self._resume_command()}"
        return self._own_failure(text, Interrupted.exit_code)

    def _resume_command(self) -> str:
        least, most = self._terms.min_ranks, self._terms.max_ranks
        return f"tutti train {self._folder.path} --min-ranks {least} --max-ranks {most}"

    def _own_failure(self, text: str, exit_code: int) -> Failure:
        is_lost = exit_code == RankLost.exit_code
        cause, lost_rank = (Cause.RANK_LOST, self._lost_rank) if is_lost else (Cause.INTERRUPTED, None)
        return Failure(0, platform.node(), time.time(), exit_code, text, True, False, cause, lost_rank)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
