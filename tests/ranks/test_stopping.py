"""Ranks agree on the last step of a run that stops: none is past it, and all make the steps up to it."""

import itertools
from collections import deque
from typing import Any, cast

import pytest

from tutti.ranks.stop_agreement import StopAgreement


class Ranks:
    """Ranks of one process whose messages are delivered one by one."""

    def __init__(self, world_size: int) -> None:
        self.messages: deque[tuple[int, str, tuple[Any, ...]]] = deque()
        self.each = [StopAgreement(cast(Any, self), rank, world_size) for rank in range(world_size)]

    def send(self, rank: int, kind: str, *content: Any) -> None:
        self.messages.append((rank, kind, content))

    def send_all(self, kind: str, *content: Any) -> None:
        for rank in range(len(self.each)):
            self.send(rank, kind, *content)

    def deliver(self) -> None:
        """Deliver all messages, and those that follow from them."""
        while self.messages:
            rank, kind, content = self.messages.popleft()
            getattr(self.each[rank], f"on_{kind}")(*content)


@pytest.mark.parametrize("begun", list(itertools.permutations((4, 5, 6))))
def test_the_last_step_is_the_largest_that_a_rank_has_begun(begun: tuple[int, ...]) -> None:
    ranks = Ranks(3)
    for stopping, step in zip(ranks.each, begun, strict=True):
        assert stopping.goes_on(step - 1)
    ranks.each[1].ask("on SIGTERM")
    ranks.deliver()
    for stopping, step in zip(ranks.each, begun, strict=True):
        made = [later for later in range(step, 10) if stopping.goes_on(later)]
        assert made == list(range(step, 6)), "the steps that this rank still makes after the one it has begun"
    assert [stopping.reason for stopping in ranks.each] == ["on SIGTERM"] * 3


def test_nothing_is_decided_before_every_rank_has_told_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.ranks.stop_agreement._AGREE_SECONDS", 0.0)
    ranks = Ranks(3)
    ranks.each[0].goes_on(4)
    ranks.each[0].ask("on SIGTERM")
    kept = [message for message in ranks.messages if message[0] != 2]  # what is sent to rank 2 is under way for long
    late = [message for message in ranks.messages if message[0] == 2]
    ranks.messages = deque(kept)
    ranks.deliver()
    assert ranks.each[0].goes_on(5) is None, "no agreement has come about"
    ranks.each[2].goes_on(7)
    ranks.messages.extend(late)
    ranks.deliver()
    assert [stopping.goes_on(7) for stopping in ranks.each] == [True] * 3
    assert [stopping.goes_on(8) for stopping in ranks.each] == [False] * 3


def test_a_run_is_stopped_once_by_the_first_reason() -> None:
    ranks = Ranks(2)
    ranks.each[0].ask("on SIGUSR1")
    ranks.each[1].ask("before the end of the allocation")
    ranks.deliver()
    ranks.each[1].ask("on SIGTERM")
    assert not ranks.messages
    assert [stopping.reason for stopping in ranks.each] == ["on SIGUSR1"] * 2
