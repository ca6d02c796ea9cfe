"""Elastic training: real workers that die, come and go, and the state that is kept meanwhile."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hvd_elastic_work as work
import pytest
import torch
from conftest import REPOSITORY, Finished, command
from prepared import PYTHON
from rank_jobs import run_ranks

from tutti.horovod import basics, elastic
from tutti.horovod.elastic import ADDED, REMOVED, ObjectState, run_fn
from tutti.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from tutti.horovod.run.messages import Notice
from tutti.horovod.torch.elastic import ElasticSampler

ranks = pytest.mark.ranks


# Real workers under a driver.


def run_job(folder: Path, options: dict[str, Any], hosts: str | None = None, **deeds: list[Any]) -> Finished:
    """A job of two epochs in which workers do what the plan says: worker_1=[[epoch, batch, deed]]."""
    if hosts is not None:
        (folder / "hosts").write_text(hosts)
        options["host_discovery_script"] = f"cat '{folder}/hosts'"
    plan = {"options": options} | {worker.removeprefix("worker_"): each for worker, each in deeds.items()}
    (folder / "plan.json").write_text(json.dumps(plan))
    script = str(REPOSITORY / "tests" / "hvd_elastic_work.py")
    return command(PYTHON, script, "drive", str(folder), cwd=folder, PYTHONPATH=str(REPOSITORY))


def ended(folder: Path) -> dict[int, dict[str, Any]]:
    """What the workers that came to the end have left, with the same weights and every sample of both epochs once."""
    found = {int(file.stem.split("-")[1]): json.loads(file.read_text()) for file in folder.glob("worker-*.json")}
    assert len({tuple(each["weights"]) for each in found.values()}) == 1
    for each in found.values():
        assert [sorted(ids) for ids in each["seen"]] == [list(range(work.SAMPLES))] * 2
    return dict(sorted(found.items()))


@ranks
@pytest.mark.parametrize("victim", [1, 0])
def test_training_goes_on_from_the_last_commit_with_one_rank_fewer(victim: int, tmp_path: Path) -> None:
    options = {"np": 3, "min_np": 2, "hosts": "localhost:1,127.0.0.1:2"}
    done = run_job(tmp_path, options, None, **{f"worker_{victim}": [[0, 2, "kill"]]})
    assert done.code == 0, done.all
    assert f"worker {victim} (rank {victim}, host" in done.err and "was ended by signal SIGKILL" in done.err
    found = ended(tmp_path)
    survivors = [worker for worker in range(3) if worker != victim]
    first_local, local_sizes = [0, 0, 1], [1, 2, 2]  # localhost has one slot, 127.0.0.1 two
    assert list(found) == survivors
    for place, worker in enumerate(survivors):
        assert found[worker]["expected"] == [worker, 3, first_local[worker], local_sizes[worker]]
        (*first, _, _), (size, rank, *_, epoch, batch) = found[worker]["sizes"]
        assert first[:2] == [3, worker]
        assert (size, rank, epoch, batch) == (2, place, 0, 2)


@ranks
def test_a_rank_that_dies_is_replaced_and_the_newcomer_takes_over_the_state(tmp_path: Path) -> None:
    options = {"np": 2, "min_np": 2, "hosts": "localhost:2", "cooldown_range": [0.1, 0.2]}
    done = run_job(tmp_path, options, worker_0=[[1, 2, "kill"]])
    assert done.code == 0, done.all
    found = ended(tmp_path)
    assert list(found) == [1, 2]
    assert found[1]["sizes"] == [[2, 1, 1, 2, 0, 0], [2, 0, 1, 2, 1, 2]]  # rank 0 has the state, with its old slot
    assert found[2]["sizes"] == [[2, 1, 0, 2, 1, 2]]
    assert found[2]["expected"] == [1, 2, 0, 2]


@ranks
def test_hosts_come_and_go(tmp_path: Path) -> None:
    both = "localhost:1\n127.0.0.1\n"
    deeds = [[0, 2, "hosts", both], [1, 2, "hosts", "localhost:1\n"]]
    done = run_job(tmp_path, {"np": 1, "min_np": 1}, "localhost:1\n", worker_0=deeds, worker_1=[[1, 2, "wait"]])
    assert done.code == 0, done.all
    assert "worker 1 leaves: host 127.0.0.1 is no longer in the job." in done.err
    found = ended(tmp_path)
    assert list(found) == [0]
    assert found[0]["syncs"] == 2  # nobody is new when a host has gone
    assert [(size, epoch, batch) for size, *_, epoch, batch in found[0]["sizes"]] == [(1, 0, 0), (2, 0, 2), (1, 1, 2)]


@ranks
def test_a_rank_that_dies_while_all_connect_does_not_hold_up_the_others(tmp_path: Path) -> None:
    options = {"np": 3, "min_np": 1, "reset_limit": 1, "hosts": "localhost:3"}
    done = run_job(tmp_path, options, worker_1=[[-1, 1, "kill"]])
    assert done.code == 0, done.all
    assert [(worker, each["sizes"][0][:2]) for worker, each in ended(tmp_path).items()] == [(0, [2, 0]), (2, [2, 1])]


@ranks
def test_too_many_resets_end_the_job(tmp_path: Path) -> None:
    options = {"np": 2, "min_np": 1, "reset_limit": 0, "hosts": "localhost:2"}
    done = run_job(tmp_path, options, worker_1=[[0, 1, "kill"]])
    assert done.code == 1
    assert "the job would be reset for the 1st time, and --reset-limit is 0." in done.err
    assert "The first failure: worker 1 (rank 1, host localhost) was ended by signal SIGKILL." in done.err


# Ranks of a plain launcher.


@ranks
def test_a_state_is_saved_restored_and_taken_over_from_rank_0() -> None:
    found = run_ranks(2, work.keep_state)
    assert [each["own"] for each in found] == [0, 1]
    for each in found:
        assert each["synced"] == found[0]["synced"]
        assert each["synced"][1:] == [0.1, 0, [0]]
        assert each["restored"] == [each["synced"][0], 2, 0, [0]]
        assert each["twice"] and each["assigned"]


@ranks
def test_kinds_of_values_can_have_handlers_of_the_users() -> None:
    assert run_ranks(2, work.handle_otherwise) == [["sync"]] * 2


@ranks
def test_all_ranks_are_interrupted_together_when_rank_0_hears_of_hosts() -> None:
    assert run_ranks(2, work.interrupt_together) == [[False]] * 2


@ranks
def test_an_operation_that_failed_is_healed_without_a_driver() -> None:
    assert run_ranks(2, work.heal_a_mismatch) == [[4, [2]]] * 2


@ranks
@pytest.mark.parametrize("how", ["again", "kill"])
def test_what_cannot_be_healed_is_an_error_that_says_so(how: str) -> None:
    found = run_ranks(2, work.fail_for_good, how, expect_failure=True)
    reason = "The job could not be started again" if how == "kill" else "A reset did not help"
    for answer in found[:1] if how == "kill" else found:
        assert f"{reason}" in answer
        assert "no elastic driver is there to replace ranks. Start the job with horovodrun --min-np N" in answer


# The parts that need no other rank.


class Recorded(ObjectState):
    """A state that notes what is asked of it."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(lambda item: item, lambda: 0, step=0)
        self.calls = calls

    def sync(self) -> None:
        self.calls.append("sync")

    def restore(self) -> None:
        self.calls.append("restore")

    def on_reset(self) -> None:
        self.calls.append("on_reset")


@pytest.mark.parametrize(
    ("problem", "then"),
    [
        (HorovodInternalError("by plan"), ["restore", "reset", "on_reset", "sync"]),
        (HostsUpdatedInterrupt(), ["reset", "on_reset", "sync"]),
        (HostsUpdatedInterrupt(skip_sync=True), ["reset", "on_reset"]),
    ],
)
def test_the_loop_restores_resets_and_synchronises_in_order(problem: Exception, then: list[str]) -> None:
    calls: list[str] = []
    problems = [problem]

    def train(state: ObjectState, word: str) -> str:
        calls.append("train")
        if problems:
            raise problems.pop()
        return word

    assert run_fn(train, lambda: calls.append("reset"))(Recorded(calls), "done") == "done"
    assert calls == ["sync", "train", *then, "train"]


def test_a_failure_while_all_fit_themselves_to_the_new_size_is_a_failure_like_others() -> None:
    calls: list[str] = []

    class Fragile(Recorded):
        def on_reset(self) -> None:
            super().on_reset()
            if calls.count("on_reset") == 1:
                raise HostsUpdatedInterrupt

    def train(_: ObjectState) -> None:
        if calls.count("on_reset") < 2:
            raise HostsUpdatedInterrupt

    run_fn(train, lambda: calls.append("reset"))(Fragile(calls))
    assert calls == ["sync", "reset", "on_reset", "reset", "on_reset", "sync"]


def test_errors_of_the_script_are_its_own() -> None:
    def train(_: ObjectState) -> None:
        raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        run_fn(train, lambda: None)(Recorded([]))


def test_attributes_of_the_user_may_have_any_name() -> None:
    state = ObjectState(lambda item: item, lambda: 0, commits=5, resets=1)
    state.commit()
    state.commit()
    assert (state.commits, state.resets) == (5, 1)
    state.commits = 9
    state.restore()
    assert state.commits == 5


def test_a_state_is_told_once_of_each_change_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    class Told(ObjectState):
        def on_hosts_updated(self, timestamp: float, update_res: int = ADDED) -> None:
            assert timestamp > 0
            told.append(update_res)  # without more, so that nothing interrupts

    notices = [None, Notice("hosts", 0), Notice("hosts", 0), Notice("hosts", 1, skip_sync=True)]
    monkeypatch.setattr(elastic, "is_driven", lambda: True)
    monkeypatch.setattr(elastic, "membership", lambda: SimpleNamespace(hosts_changed=lambda: notices.pop(0)))
    state = Told(lambda item: item, lambda: 0)
    while notices:
        state.check_host_updates()
    assert told == [ADDED, REMOVED]


def test_a_change_of_hosts_interrupts_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "is_driven", lambda: True)
    monkeypatch.setattr(elastic, "membership", lambda: SimpleNamespace(hosts_changed=lambda: Notice("hosts", 0)))
    with pytest.raises(HostsUpdatedInterrupt):
        ObjectState(lambda item: item, lambda: 0).check_host_updates()


def test_hosts_that_only_go_need_no_sync() -> None:
    state = ObjectState(lambda item: item, lambda: 0)
    state.on_hosts_updated(0.0, REMOVED)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.check_host_updates()
    assert interrupt.value.skip_sync
    state.on_hosts_updated(0.0, REMOVED)
    state.on_reset()
    state.check_host_updates()  # what was known before the reset is old


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets rank and size."""

    def set_place(rank: int, size: int) -> None:
        monkeypatch.setattr(basics, "rank", lambda: rank)
        monkeypatch.setattr(basics, "size", lambda: size)

    return set_place


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_sampler_divides_what_is_left_among_the_ranks_that_are_left(
    shuffle: bool, place: Callable[[int, int], None]
) -> None:
    data = range(103)
    processed: list[int] = []
    samplers = []
    for rank in range(4):
        place(rank, 4)
        samplers.append(ElasticSampler(data, shuffle, seed=5))
    for sampler in samplers:
        assert len(sampler) == len(list(sampler)) == 26
        loader = iter(torch.utils.data.DataLoader(data, 5, sampler=sampler))  # pyright: ignore[reportArgumentType]
        for batch in range(3):
            processed += next(loader).tolist()
            sampler.record_batch(batch, 5)
    saved = samplers[2].state_dict()
    assert saved == {"epoch": 0, "processed_num": 60}
    rest: list[int] = []
    for rank in range(3):
        place(rank, 3)
        samplers[rank].load_state_dict(saved)
        assert len(samplers[rank]) == 15
        rest += samplers[rank]
    assert len(processed) == len(set(processed)) == 60
    assert set(processed) | set(rest) == set(data)
    assert not set(processed) & set(rest)
    assert len(rest) == 45  # two are there twice, so that all ranks have as many


def test_an_epoch_begins_with_all_samples_in_another_order(place: Callable[[int, int], None]) -> None:
    place(0, 1)
    sampler = ElasticSampler(range(20))
    first = list(sampler)
    sampler.record_batch(0, 20)
    sampler.reset()
    assert list(sampler) == [] and len(sampler) == 0
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(20))
    assert list(sampler) != first
    assert ElasticSampler(range(3), shuffle=False).remaining_indices == [0, 1, 2]


def test_more_ranks_than_samples_repeat_them(place: Callable[[int, int], None]) -> None:
    found = []
    for rank in range(5):
        place(rank, 5)
        found += list(ElasticSampler(range(2), shuffle=False))
    assert found == [0, 1, 0, 1, 0]
