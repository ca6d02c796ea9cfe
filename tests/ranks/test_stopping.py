"""Ranks agree on the last step of a run that stops: none is past it, and all make the steps up to it."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tutti.errors import RankLost
from tutti.ranks import hang_detection
from tutti.ranks.hub import Hub
from tutti.ranks.hub_client import HubClient, StopAgreement


class FakeClient:
    """A rank's end of a hub in the same process, whose messages are delivered one by one."""

    def __init__(self, ranks: "Ranks", rank: int) -> None:
        self.ranks, self.rank, self.world_size = ranks, rank, ranks.world_size

    def send(self, kind: str, **content: Any) -> None:
        self.ranks.sent[self.rank] += 1
        self.ranks.messages.append((None, {"kind": kind, "from": self.rank} | content))


class Ranks:
    """A hub and its ranks in one process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.messages: deque[tuple[int | None, dict[str, Any]]] = deque()  # to a rank, or to the hub
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.hub = Hub(world_size, self._distribute)
        for rank in range(world_size):
            self.hub.join(rank, "host")
        self.begin(1)

    def begin(self, run: int) -> None:
        """Begin a run on all ranks."""
        self.each = [StopAgreement(FakeClient(self, rank), run) for rank in range(self.world_size)]  # pyright: ignore

    def _distribute(self, ranks: Iterable[int] | None, kind: str, content: dict[str, Any]) -> None:
        for rank in range(self.world_size) if ranks is None else ranks:
            self.received[rank] += 1
            self.messages.append((rank, {"kind": kind} | content))

    def deliver(self) -> None:
        """Deliver all messages, and those that follow from them."""
        while self.messages:
            rank, message = self.messages.popleft()
            if rank is None:
                self.hub.receive(message["from"], message)
            elif message["kind"] in ("stop", "last"):
                getattr(self.each[rank], f"on_{message['kind']}")(message)


@pytest.mark.parametrize("begun", list(itertools.permutations((4, 5, 6))))
def test_the_last_step_is_the_largest_that_a_rank_has_begun(begun: tuple[int, ...]) -> None:
    ranks = Ranks(3)
    for stopping, step in zip(ranks.each, begun, strict=True):
        assert stopping.continues_after(step - 1)
    ranks.each[1].ask("on SIGTERM")
    ranks.deliver()
    for stopping, step in zip(ranks.each, begun, strict=True):
        made = [later for later in range(step, 10) if stopping.continues_after(later)]
        assert made == list(range(step, 6)), "the steps that this rank still makes after the one it has begun"
    assert [stopping.reason for stopping in ranks.each] == ["on SIGTERM"] * 3


def test_a_second_run_in_the_same_processes_stops_as_well() -> None:
    ranks = Ranks(3)
    for run in (1, 2):
        ranks.begin(run)
        assert all(stopping.continues_after(run) for stopping in ranks.each)
        ranks.each[run].ask("on SIGTERM")
        ranks.deliver()
        assert [stopping.continues_after(run + 1) for stopping in ranks.each] == [False] * 3


def test_a_stop_of_the_next_run_waits_until_a_rank_has_begun_it() -> None:
    hub = HubClient(1, 2)
    hub.on("stop", StopAgreement(hub, 1).on_stop)
    hub.deliver({"kind": "stop", "reason": "on SIGTERM", "run": 2})
    following = StopAgreement(hub, 2)
    hub.on("stop", following.on_stop)
    assert following.reason == "on SIGTERM"


def test_nothing_is_decided_before_every_rank_has_told_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.ranks.hub_client._AGREE_SECONDS", 0.0)
    ranks = Ranks(3)
    ranks.each[0].continues_after(4)
    ranks.each[0].ask("on SIGTERM")
    ranks.hub.receive(*_to_hub(ranks))
    late = [message for message in ranks.messages if message[0] == 2]  # what is sent to rank 2 is under way for long
    ranks.messages = deque(message for message in ranks.messages if message[0] != 2)
    ranks.deliver()
    assert ranks.each[0].continues_after(5) is None, "no agreement has come about"
    ranks.each[2].continues_after(7)
    ranks.messages.extend(late)
    ranks.deliver()
    assert [stopping.continues_after(7) for stopping in ranks.each] == [True] * 3
    assert [stopping.continues_after(8) for stopping in ranks.each] == [False] * 3


def _to_hub(ranks: Ranks) -> tuple[int, dict[str, Any]]:
    _, message = ranks.messages.popleft()
    return message["from"], message


def test_a_run_is_stopped_once_by_the_first_reason() -> None:
    ranks = Ranks(2)
    ranks.each[0].ask("on SIGUSR1")
    ranks.each[1].ask("before the end of the allocation")
    ranks.deliver()
    ranks.each[1].ask("on SIGTERM")
    assert not ranks.messages
    assert [stopping.reason for stopping in ranks.each] == ["on SIGUSR1"] * 2


def test_however_many_ranks_are_signalled_each_sends_and_receives_two_messages_at_most() -> None:
    ranks = Ranks(300)
    for stopping in ranks.each:
        stopping.continues_after(4)
        stopping.ask("on SIGTERM")
        stopping.ask("on SIGTERM")
    ranks.deliver()
    assert set(ranks.sent.values()) == {2} and set(ranks.received.values()) == {2}
    assert [stopping.continues_after(5) for stopping in ranks.each] == [False] * 300


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    ranks = Ranks(3)
    ranks.hub.receive(2, {"kind": "leave"})
    ranks.each[0].continues_after(4)
    ranks.each[0].ask("on SIGTERM")
    ranks.messages = deque(message for message in ranks.messages if message[0] != 2)
    while ranks.messages:
        rank, message = ranks.messages.popleft()
        if rank is None:
            ranks.hub.receive(message["from"], message)
        elif rank != 2:
            getattr(ranks.each[rank], f"on_{message['kind']}")(message)
    assert [stopping.continues_after(5) for stopping in ranks.each[:2]] == [False] * 2


@pytest.mark.parametrize(
    ("ended", "how"), [(False, "does not answer: it is stopped, or hangs"), (True, "has ended or is unreachable")]
)
def test_rank_0_is_named_where_no_verdict_comes_from_it(monkeypatch: pytest.MonkeyPatch, ended: bool, how: str) -> None:
    monkeypatch.setattr(hang_detection, "_VERDICT_SECONDS", 0.0)
    hub = HubClient(1, 2)
    hub.ended = ended
    search = hang_detection.HangSearch(hub, ["n1", "n2"], lambda: pytest.fail("nobody asks"), screen=2)
    error = search.report("step 3 did not end", 0.0)
    assert str(error) == f"step 3 did not end: rank 0 on host n1, which holds the hub, {how}."
    assert (type(error), error.rank) == (RankLost, 0)


def test_messages_to_an_engine_that_has_not_started_wait_for_it() -> None:
    hub = Hub(3, lambda *_: None)
    for rank in range(3):
        hub.join(rank, "host")
    taken: list[tuple[int, int]] = []
    gone: list[int] = []

    def engine_of(generation: int) -> Callable[[int, dict[str, Any]], bool]:
        def take(rank: int, message: dict[str, Any]) -> bool:
            if message["generation"] == generation:
                taken.append((rank, generation))
            return message["generation"] <= generation

        return take

    hub.receive(1, {"kind": "engine", "generation": 0})
    hub.receive(2, {"kind": "engine", "generation": 1})
    hub.lose(2)
    hub.serve_engine(engine_of(0), gone.append)
    assert (taken, gone) == ([(1, 0)], [2])
    hub.serve_engine(engine_of(1), gone.append)
    assert taken == [(1, 0), (2, 1)]
