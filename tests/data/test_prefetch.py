"""Prefetched items: the same ones in the same order, and no thread is left running."""

import threading
from collections.abc import Iterator

import pytest

from tutti.data import loader
from tutti.data.loader import prefetched


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
def test_prefetching_keeps_items_and_order(depth: int) -> None:
    assert list(prefetched(iter(range(20)), depth)) == list(range(20))
    assert list(prefetched(iter([]), depth)) == []
    assert list(prefetched(iter([None, False, 0]), depth)) == [None, False, 0]
    assert not prefetching()


@pytest.mark.parametrize("depth", [0, 2])
def test_prefetching_gives_what_came_before_an_error_and_then_the_error(depth: int) -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise KeyError("the fourth")

    stream = prefetched(items(), depth)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="the fourth"):
        next(stream)
    assert list(stream) == []
    assert not prefetching()


def test_items_are_made_ahead_but_no_more_than_asked_for() -> None:
    made: list[int] = []
    ahead = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 2:
                ahead.set()
            yield number

    stream = prefetched(items(), 2)
    assert made == []
    assert next(stream) == 0
    assert ahead.wait(60)  # one taken, two ready
    assert next(stream) == 1
    stream.close()  # type: ignore[attr-defined]
    assert len(made) <= 4


@pytest.mark.parametrize("taken", [1, 3])
def test_a_consumer_that_stops_early_ends_the_thread(taken: int) -> None:
    stream = prefetched(iter(range(1000)), 2)
    for _ in range(taken):
        next(stream)
    assert len(prefetching()) == 1
    stream.close()  # type: ignore[attr-defined]
    assert not prefetching()


def test_a_thread_that_does_not_end_is_left_after_a_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader, "_END_SECONDS", 0.05)
    begun, free = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 0
        begun.set()
        free.wait()

    stream = prefetched(items(), 1)
    assert next(stream) == 0
    assert begun.wait(60)
    stream.close()  # type: ignore[attr-defined]
    assert capsys.readouterr().err == "warning: the prefetch thread has not ended in 0.05 s\n"
    free.set()
    for thread in prefetching():
        thread.join()
