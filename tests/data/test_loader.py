"""Batches of a rank: the same samples with the same random numbers, with and without workers and prefetching."""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tutti.config.layout import Layout
from tutti.config.load import load
from tutti.config.plan import Plan
from tutti.data.dataset import ArrayDataset
from tutti.data.loader import Loader, RankBatch, check_workers, evaluation_batches, to_device
from tutti.data.order import Draws, SampleOrder, make_order
from tutti.errors import ConfigError, DataError

CPU = torch.device("cpu")
SAMPLES, SEED = 50, 42
# From Python 3.12 on, workers started beside the thread that prefetches are warned about.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Chances:
    """A map-style dataset that draws from all three of a sample's generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *drawn], dtype=torch.float64), index


class Nested:
    """A map-style dataset whose inputs are a group of tensors."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[dict[str, Any], list[Any]]:
        value = torch.tensor([index])
        return {"a": value, "pair": (value + 100, [value + 200])}, [index, float(index)]


class Failing(Chances):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise FileNotFoundError(f"sample {index} is gone")


class Refusing(Chances):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise DataError(f"sample {index} is refused")


class Bytes(Chances):
    """Samples that are bytes until the device has them, and put together in a way of their own."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), index, dtype=torch.uint8), index

    def collate(self, samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([value for value, _ in samples]), torch.tensor([-label for _, label in samples])

    def finish(self, inputs: torch.Tensor) -> torch.Tensor:
        assert inputs.dtype == torch.uint8
        return inputs.double() / 2


class Threads(Chances):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([torch.get_num_threads()]), index


class Gappy(Chances):
    """Passes over a part of its samples, in training for another one."""

    def __init__(self, gaps: set[int]) -> None:
        self._gaps = gaps
        self.skipped: list[str] = []

    def __getitem__(self, index: int) -> Any:
        if index in self._gaps:
            self.skipped.append(str(index))
            return None
        return super().__getitem__(index)


class Shards(Chances):
    """Samples in blocks of ten, which are noted as they are read and as they are told to be read."""

    def __init__(self) -> None:
        self.blocks = range(0, SAMPLES, 10)
        self.notes: list[Any] = []

    def read_ahead(self, blocks: list[tuple[int, int]]) -> None:
        self.notes += blocks

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.notes.append(index)
        return super().__getitem__(index)


def plan(ranks: int = 1, micro: int | None = None, epochs: int = 2) -> Plan:
    return Plan(Layout(ranks), 12, 12 // ranks, micro or 12 // ranks, SAMPLES, epochs)


def steps(
    dataset: Any, made: Plan, rank: int = 0, first: int = 0, workers: int = 0, prefetch: int = 0
) -> list[RankBatch]:
    return list(Loader(dataset, made, SampleOrder(made, SEED), rank, CPU, workers, prefetch).steps(first))


def inputs(batches: list[RankBatch]) -> torch.Tensor:
    """The inputs of several steps, one after the other."""
    return torch.cat([pair[0] for batch in batches for pair in batch.micro_batches])


def images() -> ArrayDataset:
    pixels = (torch.arange(SAMPLES * 36) % 251).to(torch.uint8).reshape(SAMPLES, 1, 6, 6)
    return ArrayDataset(pixels, torch.arange(SAMPLES), mean=3.0, std=4.0, shift=2)


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_a_rank_gets_its_part_of_every_step_cut_into_micro_batches() -> None:
    made = plan(ranks=2, micro=3)
    order = SampleOrder(made, SEED)
    for rank in range(2):
        batches = steps(images(), made, rank)
        assert [batch.step for batch in batches] == list(range(8))
        assert [batch.epoch for batch in batches] == [0] * 4 + [1] * 4
        for batch in batches:
            ids = order.rank_ids(batch.step, rank)
            assert np.array_equal(batch.ids, ids)
            assert [len(targets) for _, targets in batch.micro_batches] == [3, 3]
            assert torch.cat([targets for _, targets in batch.micro_batches]).tolist() == ids.tolist()
            chosen = torch.from_numpy(ids)
            expected, _ = images().batch(chosen, Draws(SEED, batch.epoch, chosen))
            assert torch.equal(inputs([batch]), expected)


@pytest.mark.parametrize("dataset", [images(), Chances()], ids=["in memory", "by sample"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ranks_together_see_what_one_alone_sees(dataset: Any, ranks: int) -> None:
    alone = steps(dataset, plan())
    parts = [steps(dataset, plan(ranks), rank) for rank in range(ranks)]
    for step, whole in enumerate(alone):
        assert torch.equal(inputs([part[step] for part in parts]), inputs([whole]))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("dataset", "workers", "prefetch"),
    [
        (images(), 0, 2),
        (images(), 2, 0),
        (Chances(), 0, 2),
        (Chances(), 2, 0),
        (Chances(), 2, 2),
    ],
)
def test_workers_and_prefetching_change_nothing(dataset: Any, workers: int, prefetch: int) -> None:
    plain = steps(dataset, plan(ranks=2, micro=3), 1)
    other = steps(dataset, plan(ranks=2, micro=3), 1, workers=workers, prefetch=prefetch)
    assert [batch.step for batch in other] == [batch.step for batch in plain]
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(other, plain, strict=True))
    assert torch.equal(inputs(other), inputs(plain))
    assert not prefetching()


def test_a_samples_chances_are_new_each_epoch_and_not_those_of_another_sample() -> None:
    drawn = inputs(steps(Chances(), plan()))
    ids, chances = drawn[:, 0], drawn[:, 1:]
    assert len(chances.unique(dim=0)) == len(chances) == 96
    assert len(chances.unique()) == chances.numel()
    assert len(ids.unique()) == 50
    assert 0.4 < chances.mean() < 0.6


@pytest.mark.parametrize("dataset", [images(), Chances()], ids=["in memory", "by sample"])
@pytest.mark.parametrize("first", [0, 3, 4, 7, 8])
def test_a_later_start_continues_the_same_sequence(dataset: Any, first: int) -> None:
    whole = steps(dataset, plan())[first:]
    rest = steps(dataset, plan(), first=first, prefetch=2)
    assert [batch.step for batch in rest] == list(range(first, 8))
    for found, expected in zip(rest, whole, strict=True):
        assert found.epoch == expected.epoch and np.array_equal(found.ids, expected.ids)
        assert torch.equal(inputs([found]), inputs([expected]))


def test_groups_of_tensors_are_cut_along_their_first_dimension() -> None:
    batch = steps(Nested(), plan(micro=4))[0]
    assert len(batch.micro_batches) == 3
    for start, (group, targets) in zip((0, 4, 8), batch.micro_batches, strict=True):
        ids = torch.from_numpy(batch.ids[start : start + 4])
        assert torch.equal(group["a"][:, 0], ids)
        assert torch.equal(group["pair"][0][:, 0], ids + 100)
        assert torch.equal(group["pair"][1][0][:, 0], ids + 200)
        assert torch.equal(targets[0], ids) and torch.equal(targets[1], ids.double())


def test_what_cannot_be_cut_is_refused() -> None:
    class Words(Chances):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(1), f"label {index}"

    with pytest.raises(
        ConfigError, match=r"^a batch holds a str: expected tensors, or tuples, lists and dicts of them"
    ):
        steps(Words(), plan())


def test_a_dataset_of_another_kind_is_refused() -> None:
    class Stream:
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ConfigError) as caught:
        steps(Stream(), plan())
    assert str(caught.value).startswith(
        "the dataset Stream has neither batch(ids, draws) nor __getitem__(index), with __len__: expected one of the "
        "two."
    )


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_a_dataset_reaches_the_loop(workers: int, prefetch: int) -> None:
    with pytest.raises(FileNotFoundError, match="is gone") as caught:
        steps(Failing(), plan(), workers=workers, prefetch=prefetch)
    traceback.clear_frames(caught.tb)
    assert not prefetching()


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_message_for_the_user_comes_out_of_a_worker_as_it_is(workers: int, prefetch: int) -> None:
    first = int(SampleOrder(plan(), SEED).rank_ids(0, 0)[0])
    with pytest.raises(DataError) as caught:
        steps(Refusing(), plan(), workers=workers, prefetch=prefetch)
    assert str(caught.value) == f"sample {first} is refused"
    traceback.clear_frames(caught.tb)
    with pytest.raises(DataError, match=r"^sample 0 is refused$"):
        list(evaluation_batches(Refusing(), 0, 1, 8, CPU, workers, SEED))


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_may_put_batches_together_and_finish_them_itself(workers: int) -> None:
    batch = steps(Bytes(), plan(micro=4), workers=workers)[0]
    ids = torch.from_numpy(batch.ids)
    assert torch.equal(inputs([batch]), (ids.double() / 2).unsqueeze(1).expand(12, 2))
    assert torch.cat([targets for _, targets in batch.micro_batches]).tolist() == (-ids).tolist()
    found, targets = next(iter(evaluation_batches(Bytes(), 0, 1, 8, CPU, workers, SEED)))
    assert found[:, 0].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert targets.tolist() == [0, -1, -2, -3, -4, -5, -6, -7]


def test_a_dataset_of_whole_batches_may_finish_them_too() -> None:
    class Finished(ArrayDataset):
        def finish(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs + 1000

    values = torch.zeros(SAMPLES, 1)
    dataset = Finished(values, torch.arange(SAMPLES))
    assert (inputs(steps(dataset, plan())) == 1000).all()
    assert all((found == 1000).all() for found, _ in evaluation_batches(dataset, 0, 1, 8, CPU, 0, SEED))


@pytest.mark.ranks
def test_a_worker_uses_one_thread() -> None:
    assert set(inputs(steps(Threads(), plan(), workers=2)).flatten().tolist()) == {1}


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_goes_on_without_samples_that_are_passed_over(workers: int) -> None:
    dataset = Gappy({1, 8, 9, 10, 11, 49})
    pairs = list(evaluation_batches(dataset, 0, 1, 4, CPU, workers, SEED))
    whole = list(evaluation_batches(Chances(), 0, 1, 4, CPU, 0, SEED))
    assert [len(targets) for _, targets in pairs] == [3, 4, *[4] * 9, 1]
    left = torch.cat([found for found, _ in whole])[[i for i in range(SAMPLES) if str(i) not in dataset.skipped]]
    assert torch.equal(torch.cat([found for found, _ in pairs]), left)
    assert dataset.skipped == ["1", "8", "9", "10", "11", "49"]


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_passed_over_is_told_with_the_step_that_meets_it(workers: int) -> None:
    class Replacing(Gappy):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) or Chances.__getitem__(self, 0)

    made = plan()
    order = SampleOrder(made, SEED)
    gap = int(order.global_ids(2)[5])
    dataset = Replacing({gap})
    for batch in Loader(dataset, made, order, 0, CPU, workers, prefetch=3).steps(0):
        met = [step for step in range(batch.step + 1) if gap in order.global_ids(step)]
        assert batch.skipped == ((str(gap),) if gap in batch.ids else ())
        assert dataset.skipped == [str(gap)] * len(met), "not before, although it was made ahead"


@pytest.mark.ranks
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_a_dataset_ends_its_workers(prefetch: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        steps(Failing(), plan(), workers=2, prefetch=prefetch)
    left = multiprocessing.active_children()
    for worker in left:
        worker.kill()
        worker.join()
    assert not left


@pytest.mark.parametrize(("per_rank", "sizes"), [(50, [25]), (25, [25]), (10, [10, 10, 5]), (24, [24, 1])])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_evaluation_takes_each_sample_once_and_as_it_is(per_rank: int, sizes: list[int], rank: int) -> None:
    pairs = list(evaluation_batches(images(), rank, 2, per_rank, CPU, workers=0, seed=SEED))
    assert [len(targets) for _, targets in pairs] == sizes
    ids = torch.arange(25 * rank, 25 * rank + 25)
    assert torch.equal(torch.cat([targets for _, targets in pairs]), ids)
    assert torch.equal(torch.cat([found for found, _ in pairs]), images().batch(ids, None)[0])


@pytest.mark.parametrize("ranks", [1, 3, 50, 64])
def test_the_ranks_together_evaluate_each_sample_once(ranks: int) -> None:
    seen = [
        int(target)
        for rank in range(ranks)
        for _, targets in evaluation_batches(images(), rank, ranks, 7, CPU, workers=0, seed=SEED)
        for target in targets
    ]
    assert seen == list(range(SAMPLES))


@pytest.mark.ranks
def test_an_evaluation_by_sample_is_the_same_each_time_and_with_any_workers() -> None:
    def run(workers: int) -> torch.Tensor:
        return torch.cat([found for found, _ in evaluation_batches(Chances(), 0, 1, 8, CPU, workers, SEED)])

    first = run(0)
    assert first[:, 0].tolist() == list(range(SAMPLES))
    random.random(), torch.rand(3)
    assert torch.equal(run(0), first)
    assert torch.equal(run(2), first)
    trained = inputs(steps(Chances(), plan()))
    assert not set(first[:, 1].tolist()) & set(trained[:, 1].tolist())


@pytest.mark.ranks
def test_a_loop_that_breaks_leaves_neither_threads_nor_processes() -> None:
    made = plan()
    loader = Loader(Chances(), made, SampleOrder(made, SEED), 0, CPU, workers=2, prefetch=2)
    for batch in loader.steps(0):
        if batch.step == 1:
            break
    assert not prefetching()


def test_a_tensor_that_is_there_already_is_left_alone() -> None:
    batch = torch.zeros(2)
    assert to_device(batch, CPU) is batch


def test_tensors_are_moved_wherever_they_are_in_a_batch() -> None:
    meta = torch.device("meta")
    moved = to_device({"a": torch.zeros(2), "b": [torch.zeros(1), (torch.zeros(3), "text", 4)]}, meta)
    assert moved["a"].device == moved["b"][0].device == moved["b"][1][0].device == meta
    assert moved["b"][1][1:] == ("text", 4)


def test_more_workers_than_a_host_can_run_are_refused() -> None:
    check_workers(64)
    with pytest.raises(ConfigError, match=r"data.workers=5000: expected at most \d+ loader processes on each rank; "):
        check_workers(5000)


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_all_processes_of_a_job_leaves_workers_to_their_rank(number: int) -> None:
    batches = Loader(Chances(), plan(), SampleOrder(plan(), SEED), 0, CPU, 1, 0).steps(0)
    first = next(batches)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid or 0, number)
    alone = steps(Chances(), plan())
    assert torch.equal(inputs([first, *batches]), inputs(alone))


def test_a_dataset_in_shards_is_told_of_them_before_they_are_read() -> None:
    dataset, made = Shards(), plan()
    config = load("digits", "data.shuffle=blocks", "data.shuffle_window=2")
    order = make_order(config, made, dataset)
    batches = list(Loader(dataset, made, order, 0, CPU, 0, 0).steps(0))
    assert len(batches) == 8
    told: set[int] = set()
    for note in dataset.notes:
        if isinstance(note, tuple):
            told |= set(range(*note))
        else:
            assert note in told
    assert sorted(note for note in dataset.notes if isinstance(note, tuple)) == sorted(
        2 * [(first, first + 10) for first in range(0, SAMPLES, 10)]
    )
    assert isinstance(dataset.notes[4], int), "the first batch is read when two windows are known"


def test_a_dataset_that_reads_ahead_is_left_alone_without_blocks() -> None:
    dataset = Shards()
    steps(dataset, plan())
    assert not any(isinstance(note, tuple) for note in dataset.notes)
