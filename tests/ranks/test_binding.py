"""Ranks get whole cores of their own, near their memory and their GPU, by made-up machines and by this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tutti import units
from tutti.ranks.cores import (
    Core,
    Mode,
    Topology,
    choose_cores,
    choose_near_gpu,
    parse_list,
    read_topology,
    visible_gpus,
)


def machine(domains: int, cores: int, threads: int = 1) -> Topology:
    """Processors numbered as Linux does: first threads of all cores, then the second ones."""
    total = domains * cores
    return tuple(Core(tuple(core + total * t for t in range(threads)), core // cores) for core in range(total))


def everything(topology: Topology) -> set[int]:
    return {cpu for core in topology for cpu in core.cpus}


def shares(mode: Mode, ranks: int, topology: Topology, allowed: set[int] | None = None) -> list[list[int] | None]:
    may = everything(topology) if allowed is None else allowed
    return [choose_cores(mode, rank, ranks, may, topology) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("mode", "ranks", "topology", "expected"),
    [
        ("compact", 1, machine(2, 4), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("compact", 2, machine(2, 4), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("compact", 4, machine(2, 4), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("compact", 3, machine(2, 4), [[0, 1], [2, 3], [4, 5]]),
        ("compact", 3, machine(2, 3), [[0, 1], [2, 3], [4, 5]]),
        ("compact", 2, machine(1, 2, threads=2), [[0, 2], [1, 3]]),
        ("spread", 1, machine(2, 2), [[0, 1, 2, 3]]),
        ("spread", 2, machine(2, 4), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("spread", 4, machine(2, 4), [[0, 1], [4, 5], [2, 3], [6, 7]]),
        ("spread", 3, machine(2, 4), [[0, 1], [4, 5], [2, 3]]),
        ("spread", 2, machine(4, 1), [[0, 2], [1, 3]]),
        ("spread", 2, machine(3, 1), [[0], [1]]),
        ("spread", 4, machine(2, 2, threads=2), [[0, 4], [2, 6], [1, 5], [3, 7]]),
    ],
)
def test_every_rank_gets_as_many_whole_cores(
    mode: Mode, ranks: int, topology: Topology, expected: list[list[int]]
) -> None:
    assert shares(mode, ranks, topology) == expected


@pytest.mark.parametrize("mode", ["compact", "spread"])
@pytest.mark.parametrize("topology", [machine(1, 7), machine(2, 5, 2), machine(4, 3), machine(3, 4, 2)])
def test_no_processor_is_given_twice_and_no_rank_gets_more(mode: Mode, topology: Topology) -> None:
    for ranks in range(1, len(topology) + 1):
        given = [set(share or ()) for share in shares(mode, ranks, topology)]
        assert len({len(share) for share in given}) == 1
        assert all(given)
        assert sum(map(len, given)) == len(set().union(*given))
        assert set().union(*given) <= everything(topology)
        whole = [set(core.cpus) <= share or not set(core.cpus) & share for core in topology for share in given]
        assert all(whole)


def test_compact_stays_inside_a_domain_where_that_costs_nobody_a_core() -> None:
    topology = machine(2, 5)
    assert shares("compact", 4, topology) == [[0, 1], [2, 3], [5, 6], [7, 8]]


def test_only_allowed_processors_are_given() -> None:
    topology = machine(2, 4, threads=2)
    assert shares("compact", 2, topology, {2, 3, 10, 11, 4}) == [[2, 10], [3, 11]]
    assert shares("spread", 2, topology, {2, 3, 4, 5}) == [[2, 3], [4, 5]]


def test_a_small_domain_does_not_leave_its_guests_without_cores() -> None:
    topology = (Core((0,), 0), *(Core((cpu,), 1) for cpu in range(1, 6)))
    assert all(shares("spread", 4, topology))


def test_nobody_is_bound_without_a_mode_or_with_fewer_cores_than_ranks() -> None:
    assert shares("none", 2, machine(1, 4)) == [None, None]
    assert shares("compact", 3, machine(1, 2, threads=2)) == [None, None, None]
    assert shares("spread", 3, machine(2, 1)) == [None, None, None]


def test_ranks_share_the_cores_next_to_their_gpus() -> None:
    topology = machine(2, 4)
    first, second = {0, 1, 2, 3}, {4, 5, 6, 7}
    near = [second, first, second, first]  # as on nodes where the first GPU is next to the last cores
    given = [choose_near_gpu("compact", rank, 4, everything(topology), topology, near) for rank in range(4)]
    assert given == [[4, 5], [0, 1], [6, 7], [2, 3]]
    assert choose_near_gpu("compact", 0, 4, everything(topology), topology, near[:1]) is None
    assert choose_near_gpu("compact", 0, 4, everything(topology), topology, []) is None


def test_visible_devices_choose_and_order_the_gpus() -> None:
    found = [["0", "GPU-aa", "a"], ["1", "GPU-bb", "b"], ["2", "GPU-cc", "c"]]
    assert visible_gpus(found, {}) == found
    assert [gpu[2] for gpu in visible_gpus(found, {"CUDA_VISIBLE_DEVICES": "2,0"})] == ["c", "a"]
    assert [gpu[2] for gpu in visible_gpus(found, {"CUDA_VISIBLE_DEVICES": "GPU-bb"})] == ["b"]
    assert [gpu[2] for gpu in visible_gpus(found, {"CUDA_VISIBLE_DEVICES": "1,9,0"})] == ["b"]
    assert visible_gpus(found, {"CUDA_VISIBLE_DEVICES": ""}) == []


def test_the_topology_is_read_as_the_kernel_writes_it(tmp_path: Path) -> None:
    for cpu, threads in enumerate(("0,2", "1,3", "0,2", "1,3", "4")):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{threads}\n")
    (tmp_path / "cpu" / "online").write_text("0-3\n")
    for node, cpus in enumerate(("1,3", "0,2")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    assert read_topology(tmp_path) == (Core((1, 3), 0), Core((0, 2), 1))


def test_without_the_kernels_word_every_processor_is_a_core(tmp_path: Path) -> None:
    assert read_topology(tmp_path) == tuple(Core((cpu,), 0) for cpu in range(os.cpu_count() or 1))


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("1,3,5", {1, 3, 5})]
)
def test_lists_of_processors_are_read_and_written(text: str, numbers: set[int]) -> None:
    assert parse_list(f"{text}\n") == numbers
    assert units.ranges(numbers) == text


BIND = """
import json, os, sys
from tutti.ranks.cores import bind
if sys.argv[3] != "all":
    os.sched_setaffinity(0, {int(sys.argv[3])})
bound = bind(sys.argv[1], 0, int(sys.argv[2]))
print(bound.line())
print(sorted(os.sched_getaffinity(0)) == list(bound.cpus), bound.bound, bound.threads, "torch" in sys.modules)
"""


def bind(mode: str, ranks: int, allowed: str) -> list[str]:
    words = [sys.executable, "-c", BIND, mode, str(ranks), allowed]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


@pytest.mark.system
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < max(2, os.cpu_count() or 1),
    reason="needs a host of two processors or more, all of which may be used",
)
def test_a_rank_is_bound_to_its_share_of_this_host_and_says_so() -> None:
    cores = len(read_topology())
    line, state = bind("compact", cores, "all")
    assert line.startswith("cores ") and line.endswith("(compact)")
    assert state == "True True 1 False"
    assert bind("none", cores, "all")[0].endswith("(not bound)")
    line, state = bind("spread", cores + 1, "all")
    assert line.endswith(f"(not bound: {cores + 1} ranks share {cores} core(s))")
    assert state == "True False None False"


@pytest.mark.system
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors"
)
def test_what_a_launcher_has_bound_stays_as_it_is() -> None:
    cpu = max(os.sched_getaffinity(0))
    line, state = bind("compact", 1, str(cpu))
    assert line.startswith(f"cores {cpu}") and line.endswith("(as the launcher has bound it)")
    assert state == "True False None False"
