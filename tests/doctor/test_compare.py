"""Made-up ranks: those that differ from most are named with host, value and fix."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tutti.doctor.exchange import decode
from tutti.doctor.facts import Facts
from tutti.doctor.findings import compare, compare_clocks
from tutti.errors import LaunchError
from tutti.launch.cluster.staging.arrival import Arrival, find_arrival
from tutti.ranks.group import disagreements

VERSIONS = {"python": "3.12.1", "torch": "2.13.0", "tutti": "0.5.0", "code": "aaaa"}
GIB = 2**30


def rank(number: int, host: str | None = None, **more: Any) -> Facts:
    healthy: dict[str, Any] = {
        "host": host or f"n{number}",
        "fingerprint": VERSIONS,
        "memory_free": 8 * GIB,
        "memory_total": 16 * GIB,
        "shared_memory_free": 4 * GIB,
        "scratch": "/tmp",
        "scratch_free": 50 * GIB,
        "folder": "/runs",
        "folder_free": 50 * GIB,
        "limits": {"open files": 65536, "locked memory": -1, "processes": 60000},
    }
    return Facts(rank=number, **{**healthy, **more})


def lines(facts: list[Facts]) -> list[str]:
    return [each.line() for each in compare(facts)]


def test_equal_ranks_are_no_finding() -> None:
    assert lines([rank(number) for number in range(4)]) == []


def test_a_rank_with_another_version_is_named() -> None:
    odd = rank(3, "n2", fingerprint=VERSIONS | {"torch": "2.11.0"})
    assert lines([rank(0), rank(1), rank(2, "n2"), odd]) == [
        "fault: rank 3 on host n2 has torch 2.11.0, all others have torch 2.13.0. "
        "Install the same on all hosts, or start from a folder that they share."
    ]


def test_ranks_of_a_host_are_named_together_and_hosts_apart() -> None:
    facts = [rank(number, f"n{number // 4}") for number in range(16)]
    facts[4:8] = [replace(each, fingerprint=VERSIONS | {"torch": "2.11.0"}) for each in facts[4:8]]
    facts[12] = replace(facts[12], fingerprint=VERSIONS | {"torch": "2.12.0"})
    first, second = lines(facts)
    assert first.startswith("fault: ranks 4-7 on host n1 have torch 2.11.0, 11 of 16 ranks have torch 2.13.0.")
    assert second.startswith("fault: rank 12 on host n3 has torch 2.12.0, 11 of 16 ranks have torch 2.13.0.")


def test_if_two_ranks_differ_the_other_than_rank_0_is_named() -> None:
    (line,) = lines([rank(0), rank(1, fingerprint=VERSIONS | {"code": "bbbb"})])
    assert line.startswith(
        "fault: rank 1 on host n1 has tutti's code with digest bbbb, rank 0 has tutti's code with digest aaaa."
    )


def test_fingerprints_of_all_ranks_are_compared_at_every_start() -> None:
    assert disagreements([VERSIONS] * 3, ["a", "b", "c"]) == []
    (line,) = disagreements([VERSIONS, VERSIONS, {"python": "3.12.1"} | VERSIONS | {"tutti": "0.4.0"}], ["a", "b", "c"])
    assert line.startswith("rank 2 on host c has tutti 0.4.0, all others have tutti 0.5.0.")
    (line,) = disagreements([VERSIONS, VERSIONS, {k: v for k, v in VERSIONS.items() if k != "torch"}], ["a", "b", "c"])
    assert line.startswith("rank 2 on host c has no torch, all others have torch 2.13.0.")


def test_a_rank_without_an_answer_does_not_shift_the_others() -> None:
    facts = [rank(0), rank(1), rank(3, fingerprint=VERSIONS | {"torch": "2.11.0"})]
    assert lines(facts)[0].startswith("fault: rank 3 on host n3 has torch 2.11.0")


def test_a_host_with_other_code_of_the_user_is_named() -> None:
    facts = [rank(number, user_code={"mine": "cccc"}) for number in range(3)]
    facts.append(rank(3, user_code={"mine": "missing"}))
    (line,) = lines(facts)
    assert line.startswith(
        "fault: rank 3 on host n3 has no module 'mine', all others have the module 'mine' with digest"
    )
    (line,) = lines([rank(number, user_code={"mine": "missing"}) for number in range(2)])
    assert line == "fault: no rank finds the module 'mine' that the recipe names. Set PYTHONPATH to its folder."


def test_a_host_with_other_data_is_named() -> None:
    whole = {"data/x": {"kind": "file", "bytes": 4096, "digest": "dddd"}}
    facts = [rank(0, data=whole), rank(1, "n0"), rank(2, data=whole), rank(3, data={"data/x": {"kind": "missing"}})]
    (line,) = lines(facts)
    assert line.startswith("fault: rank 3 on host n3 has no data/x, all others have data/x of 4 KiB with digest dddd.")
    unreadable = {"data/x": {"kind": "unreadable", "why": "Permission denied"}}
    (line,) = lines([rank(0, data=whole), rank(1, data=whole), rank(2, data=unreadable)])
    assert line.startswith("fault: rank 2 on host n2 has data/x that it cannot read (Permission denied), all others")


def test_data_that_no_host_has_is_a_fault() -> None:
    missing = {"data/x": {"kind": "missing"}}
    (line,) = lines([rank(0, data=missing), rank(1, data=missing)])
    assert line == "fault: no host has data/x, where the recipe reads its data. Set data.path, or fetch it."


def test_other_visible_devices_are_named() -> None:
    gpus = ["H200", "H200"]
    facts = [rank(0, devices=gpus), rank(1, devices=gpus), rank(2, devices=["H200"]), rank(3, devices=gpus)]
    (line,) = lines(facts)
    assert line.startswith(
        "fault: rank 2 on host n2 has visible devices: H200, all others have visible devices: H200, H2"
    )
    (line,) = lines([rank(0), rank(1, device="failed: CUDA error")])
    assert line.startswith("fault: rank 1 on host n1: its GPU failed: CUDA error.")


def test_variables_that_differ_are_warnings() -> None:
    facts = [rank(number, environment={"OMP_NUM_THREADS": "4"}) for number in range(3)] + [rank(3)]
    assert lines(facts) == ["warning: rank 3 on host n3 has OMP_NUM_THREADS not set, all others have OMP_NUM_THREADS 4"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            {"limits": {"open files": 128}},
            "has a limit of 128 open files, expected 272 for 4 ranks. Set ulimit -n 272.",
        ),
        ({"limits": {"processes": 100}}, "has a limit of 100 processes, expected 320 for 1 rank on it."),
        (
            {"limits": {"locked memory": 65536}, "infiniband": True},
            "has a limit of 64 KiB of locked memory, expected no limit, which InfiniBand needs.",
        ),
        ({"memory_free": GIB // 4}, "has 256 MiB of free memory, expected 512 MiB for 1 rank."),
        ({"folder_free": GIB // 2}, "has 512 MiB free in /runs, expected 1 GiB or more."),
        ({"scratch_free": 0}, "has 0 B free in /tmp, expected 256 MiB or more."),
        ({"shared_memory_free": 2**20}, "has 1 MiB free in /dev/shm, expected 60 MiB or more."),
    ],
)
def test_what_is_too_small_is_a_warning_for_its_host(more: dict[str, Any], expected: str) -> None:
    (line,) = lines([rank(0), rank(1), rank(2), rank(3, **more)])
    assert line.startswith(f"warning: host n3 {expected}")


def test_no_limit_and_what_is_not_known_are_enough() -> None:
    limits = {"open files": -1, "processes": -1, "locked memory": -1}
    unknown = rank(1, limits=limits, infiniband=True, memory_total=0, memory_free=0, folder_free=-1, scratch_free=-1)
    assert lines([rank(0), unknown]) == []


def test_a_wrong_clock_is_a_warning() -> None:
    (late, early) = compare_clocks({"n0": 0.0, "n1": -7.25, "n2": 3600.0})
    assert late.line().startswith("warning: the clock of host n1 is 7.2 s behind rank 0's: expected less than 2 s.")
    assert early.line().startswith("warning: the clock of host n2 is 3600.0 s ahead of rank 0's")


def test_facts_of_another_version_can_be_read() -> None:
    assert decode({"rank": 3, "host": "n3", "colour": "blue"}, Facts, "rank 3") == Facts(rank=3, host="n3")
    assert decode(json.loads(json.dumps(asdict(rank(2)))), Facts, "rank 2") == rank(2)


def test_facts_that_cannot_be_read_name_the_rank() -> None:
    with pytest.raises(LaunchError, match=r"^rank 3 sent values .* cannot read \(port: .*Install the same version"):
        decode({"rank": 3, "port": "eighty"}, Facts, "rank 3")


COPY = "/local/tutti-environment-0-ab"


def test_a_host_that_has_no_copy_of_the_environment_or_another_one_is_named() -> None:
    good = Arrival("ab", COPY, "ab", 20, 20)
    code = f"{COPY}/path-0/tutti"
    facts = [rank(number, staged=good, code_folder=code) for number in range(3)]
    assert lines(facts) == []
    [text] = lines([*facts, rank(3, staged=Arrival("ab"), code_folder="/home/me/tutti")])
    assert text.startswith(
        "warning: rank 3 on host n3 has the shared environment, all others have the staged environment ab."
    )
    odd, fault = lines([*facts, rank(3, staged=replace(good, arrived="cd"), code_folder=code)])
    assert odd.startswith("warning: rank 3 on host n3 has the staged environment cd, all others")
    assert fault.startswith("fault: host n3 has a copy of the environment cd, expected ab. Remove /local/")


def test_a_copy_that_is_not_whole_or_not_used_is_a_fault() -> None:
    short = Arrival("ab", COPY, "ab", 19, 20)
    [text] = lines([rank(0, staged=short, code_folder=f"{COPY}/tutti")])
    assert text.startswith("fault: host n0 has lost a part of the staged environment: it has 19 of 20 files. Remove")
    [text] = lines([rank(0, staged=replace(short, files=20), code_folder="/home/me/tutti")])
    assert text == f"fault: host n0 imports tutti from /home/me/tutti, expected the copy in {COPY}. Check PYTHONPATH."


def test_what_a_rank_finds_of_its_copy_crosses_the_store(tmp_path: Path) -> None:
    (tmp_path / "prefix" / "__pycache__").mkdir(parents=True)
    for name in ("prefix/a.py", "prefix/__pycache__/a.pyc", "prefix/b.py"):
        (tmp_path / name).touch()
    (tmp_path / "prefix" / "link").symlink_to("a.py")
    assert find_arrival({}) is None
    assert find_arrival({"TUTTI_STAGED_ENVIRONMENT": "ab"}) == Arrival("ab")
    given = {"TUTTI_STAGED_ENVIRONMENT": f"ab {tmp_path}"}
    assert find_arrival(given) == Arrival("ab", str(tmp_path)), "without its note the copy is not complete"
    (tmp_path / "complete").write_text("ab 2\n")
    found = rank(0, staged=find_arrival(given))
    assert found.staged == Arrival("ab", str(tmp_path), "ab", 2, 2)
    assert decode(json.loads(json.dumps(asdict(found))), Facts, "rank 0") == found
