"""Which ranks are called slow."""

from tutti.train.timing import Stragglers


def test_a_rank_that_takes_longer_than_the_others_is_named_once_and_counted_on() -> None:
    watch = Stragglers(["a", "a", "b", "b"], factor=1.5)
    assert watch.compare([1.0, 1.1, 0.9, 1.0], steps=10, window_seconds=2.0, step=10) == []
    (line,) = watch.compare([1.0, 1.0, 1.0, 1.8], steps=10, window_seconds=2.6, step=20)
    assert line.startswith("slow rank: rank 3 on host b takes 180.0 ms a step")
    assert "the others 100.0 ms" in line
    assert watch.compare([1.0, 1.0, 1.0, 2.0], steps=10, window_seconds=2.8, step=30) == []
    (slow,) = watch.found.values()
    assert (slow.rank, slow.host, slow.windows, slow.worst, slow.first_step, slow.last_step) == (3, "b", 2, 2.0, 20, 30)


def test_of_two_ranks_the_slow_one_is_found() -> None:
    watch = Stragglers(["a", "b"], factor=1.5)
    assert watch.compare([1.0, 3.0], steps=10, window_seconds=4.0, step=10)
    assert list(watch.found) == [1]


def test_what_costs_the_run_nothing_is_not_worth_a_word() -> None:
    watch = Stragglers(["a", "b"], factor=1.5)
    assert watch.compare([0.001, 0.01], steps=10, window_seconds=4.0, step=10) == []


def test_on_cpus_milliseconds_are_the_operating_system() -> None:
    short = Stragglers(["a", "a"], factor=1.5, on_cpus=True)
    assert short.compare([0.02, 0.06], steps=20, window_seconds=0.08, step=20) == []
    assert Stragglers(["a", "a"], factor=1.5).compare([0.02, 0.06], steps=20, window_seconds=0.08, step=20)
    assert short.compare([0.2, 0.6], steps=20, window_seconds=0.8, step=40)


def test_a_window_of_few_steps_and_a_run_of_one_rank_say_nothing() -> None:
    assert Stragglers(["a", "b"], factor=1.5).compare([1.0, 9.0], steps=1, window_seconds=9.0, step=1) == []
    assert Stragglers(["a"], factor=1.5).compare([1.0], steps=10, window_seconds=9.0, step=10) == []
