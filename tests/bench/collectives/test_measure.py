"""`tutti bench collectives` on real ranks, on hosts with links of a known rate, and with wrong input."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import namespaces
import pytest
from conftest import Finished, Tutti, environment

from tutti import units
from tutti.bench.collectives.measure import affordable, rank_counts
from tutti.bench.collectives.results import DEFAULT_SIZES, Dropped, Measured, Results, parse_sizes, read_results
from tutti.cli import collectives
from tutti.cli.collectives import bench_collectives, describe, print_points
from tutti.errors import ConfigError, FolderError, LaunchError, TuttiError
from tutti.report.bench import draw_collectives

pytestmark = pytest.mark.xdist_group("collectives")


def made_up(backend: str = "gloo") -> Results:
    """Two ranks on a host and four on two, with a link of 1 Gbit/s."""
    points = []
    for ranks, hosts, bandwidth in ((2, 1, 2e9), (4, 2, 1e9 / 8 * 1448 / 1514)):
        for size in (1024, 1 << 20, 1 << 26):
            seconds = 1e-4 * 2 * (ranks - 1) + 2 * (ranks - 1) / ranks * size / bandwidth
            points.append(Measured("all_reduce", ranks, hosts, size, 5, (seconds, 1.1 * seconds, 0.9 * seconds)))
    conditions = {"hosts": ["a", "a", "b", "b"], "ranks": 4, "backend": backend, "trials": 3}
    return Results(
        conditions, points, [Dropped("all_reduce", 4, 1 << 28, 4.0), Dropped("all_reduce", 4, 1 << 30, 16.0)]
    )


def test_ranks_are_doubled_up_to_all_of_them() -> None:
    assert [rank_counts(n) for n in (2, 3, 4, 6, 8)] == [[2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


def test_sizes_are_powers_of_1024() -> None:
    assert parse_sizes("1MB, 1KB,64B,1.5kb,1GiB,8") == (8, 64, 1024, 1536, 1 << 20, 1 << 30)
    assert parse_sizes(None) == DEFAULT_SIZES
    assert [units.size(size) for size in (DEFAULT_SIZES[0], DEFAULT_SIZES[-1], 1020, 1 << 30)] == [
        "1 KiB",
        "64 MiB",
        "1,020 B",
        "1 GiB",
    ]


def test_points_that_take_too_long_are_left_out_the_longest_first() -> None:
    assert affordable({0: 1.0, 1: 5.0, 2: 2.0}, 10.0) == {0, 1, 2}
    assert affordable({0: 1.0, 1: 5.0, 2: 2.0}, 4.0) == {0, 2}
    assert affordable({0: 1.0, 1: 5.0}, 0.5) == set()


def test_times_and_rates_have_three_digits_and_a_unit() -> None:
    assert [units.duration(each, keep_zeros=True) for each in (2.0, 0.0123, 4.56e-5, 0.0)] == [
        "2.00 s",
        "12.3 ms",
        "45.6 us",
        "0 us",
    ]
    assert [units.bandwidth(each) for each in (1.2e9, 119.4e6, 999.0)] == ["1.20 GB/s", "119 MB/s", "999 B/s"]


def test_bandwidths_follow_the_convention_of_nccl_tests() -> None:
    seconds = (0.5, 0.4, 0.9)  # whose mean is not their median
    found = [Measured(operation, 4, 1, 1000, 1, seconds) for operation in ("all_reduce", "broadcast", "all_gather")]
    assert [each.bytes_per_second for each in found] == [2000] * 3
    assert [each.bus_bytes_per_second for each in found] == [3000, 2000, 1500]


def test_the_report_says_what_was_dropped_the_fits_and_the_rate_of_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    results = made_up()
    print_points(results)
    lines = list(describe(results))
    table = capsys.readouterr().out
    assert "all_reduce      4      2  64 MiB" in table
    assert "sizes in powers of 1024, rates in powers of 1000" in table
    assert lines[0] == (
        "dropped: all_reduce on 4 ranks of 256 MiB, 1 GiB: a call may take 4.00 s or more. "
        "Give more time with --seconds."
    )
    assert lines[1].startswith("all_reduce on 2 ranks, 1 host: 200 us + bytes / 2.00 GB/s (bus 2.00 GB/s), off by 0.0%")
    assert lines[2].startswith("all_reduce on 4 ranks, 2 hosts: 600 us + bytes / 79.7 MB/s (bus 120 MB/s), off by 0.0%")
    assert lines[3].startswith(
        "model of all_reduce on n ranks of one host: ring, 0 us + 100 us a step, 2.00 GB/s a link"
    )
    assert lines[4].startswith("model of all_reduce on n ranks of several hosts: ring, 0 us + 100 us a step, 120 MB/s")
    assert lines[5].startswith(
        "links between hosts carry 119 MB/s of payload (all_reduce of 64 MiB, 4 ranks): 0.999 Gbit/s"
    )
    assert "MTU 1500 (1514 bytes for 1448)" in lines[5]


def test_nothing_is_said_of_ethernet_for_nccl_or_a_single_host() -> None:
    assert not any("Ethernet" in line for line in describe(made_up("nccl")))
    assert made_up("nccl").content()["link"] is None


def test_a_single_size_is_reported_without_a_fit() -> None:
    results = made_up()
    single = Results(results.conditions, results.points[:1], [])
    assert list(describe(single)) == ["no fit: it needs two sizes of messages."]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("conditions", {"hosts": ["n1"]}, "conditions.backend is missing"),
        ("conditions", {"hosts": "n1", "backend": "gloo"}, "conditions.hosts is 'n1': expected names"),
        ("points", [{"operation": "all_reduce"}], "points.0.ranks: Field required"),
    ],
)
def test_a_damaged_file_of_results_is_refused_with_the_value(
    key: str, value: object, expected: str, tmp_path: Path
) -> None:
    made_up().write(tmp_path)
    content = json.loads((tmp_path / "collectives.json").read_text())
    (tmp_path / "collectives.json").write_text(json.dumps(content | {key: value}))
    with pytest.raises(
        FolderError, match=rf"collectives.json is no measurement of collectives \({re.escape(expected)}"
    ):
        read_results(tmp_path)


def test_results_are_read_again_as_they_were_written_and_drawn(tmp_path: Path) -> None:
    results = made_up()
    results.write(tmp_path)
    assert read_results(tmp_path) == results
    assert draw_collectives(tmp_path).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["collectives.json", "collectives.png"]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"operations": "all_reduce,brodcast"}, ConfigError, "'brodcast' is not measured.*Did you mean 'broadcast'"),
        ({"sizes": "1KB,12XB"}, ConfigError, "'12XB' is not the size of a message: expected.*--sizes 1KB,1MB"),
        ({"sizes": "2B"}, ConfigError, "'2B' is not the size of a message: expected sizes of 4 B or more"),
        ({"sizes": ""}, ConfigError, "'' is not the size of a message"),
        ({"trials": 1}, ConfigError, "--trials 1: expected 2 or more"),
        ({"seconds": 0.0}, ConfigError, "--seconds 0: expected a number of seconds above 0"),
        ({"ranks": 1}, LaunchError, "-n 1: a collective needs 2 ranks or more. Try -n 2"),
        ({"ranks": 0}, LaunchError, "-n 0: expected 1 or more ranks"),
        ({"overrides": ["runtime.devise=cpu"]}, ConfigError, "Did you mean 'device'"),
    ],
)
def test_wrong_input_is_explained_and_leaves_nothing(
    given: dict[str, Any], kind: type[TuttiError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = {"overrides": [], "ranks": None, "trials": 5, "seconds": 1.0, "sizes": None, "operations": None}
    with pytest.raises(kind, match=message) as caught:
        bench_collectives(**usual | given)
    assert caught.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_launcher_with_one_rank_is_told_to_start_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(LaunchError, match="torchrun has started 1 rank: a collective needs 2 ranks or more"):
        bench_collectives([], None, 5, 1.0, None, None)


def test_two_ranks_are_started_where_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(collectives, "on_ranks", lambda kind, config, ranks, *_: asked.append((config.recipe, ranks)))
    bench_collectives([], None, 5, 1.0, None, None)
    bench_collectives([], 4, 5, 1.0, None, None)
    assert asked == [("collectives", 2), ("collectives", 4)]


@pytest.mark.ranks
def test_the_first_two_of_three_ranks_measure_as_a_group_of_their_own(tutti: Tutti, tmp_path: Path) -> None:
    words = ("--sizes", "1KB,16KB", "--trials", "2", "--seconds", "0.4", "-n", "3")
    done = tutti("bench", "collectives", "runtime.device=cpu", "out=there", *words)
    assert (done.code, done.err) == (0, "")
    *_, picture, last = done.out.splitlines()
    folder = tmp_path / last.removeprefix("run folder: ")
    assert folder.parent == tmp_path / "there" / "bench" / "collectives"
    assert picture == f"picture: {folder.relative_to(tmp_path) / 'collectives.png'}"
    assert (folder / "collectives.png").is_file()
    results = read_results(folder)
    small = [("all_reduce", 2, 1024), ("broadcast", 2, 1024), ("all_gather", 2, 1024)]
    small += [("all_reduce", 3, 1024), ("broadcast", 3, 1024), ("all_gather", 3, 1020)]
    assert [(point.operation, point.ranks, point.bytes) for point in results.points[:6]] == small
    assert all(len(point.trials_seconds) == 2 and min(point.trials_seconds) > 0 for point in results.points)
    assert results.conditions["backend"] == "gloo" and len(results.conditions["hosts"]) == 3
    assert {"versions", "hardware", "clock", "threads_per_rank", "launch_line"} <= set(results.conditions)


def bench_hosts(rate: str, folder: Path, *words: str) -> Finished:
    """`tutti bench collectives` on two hosts with one rank each; what rank 0 has said."""
    if why := namespaces.unavailable():
        pytest.skip(why)
    command = [sys.executable, "-m", "tutti", "bench", "collectives", "runtime.device=cpu", *words]
    with namespaces.hosts(2, rate=rate) as made:
        variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
        started = [
            made.start(
                host,
                command,
                environment(RANK=str(rank), GROUP_RANK=str(rank), MASTER_ADDR=made.address("h1"), **variables),
                folder,
            )
            for rank, host in enumerate(made)
        ]
        done = []
        for process in started:
            with process:
                try:
                    out, err = process.communicate()
                except BaseException:
                    process.kill()
                    raise
            done.append(Finished(process.returncode, out, err))
    assert [(each.code, each.err) for each in done] == [(0, ""), (0, "")]
    return done[0]


def read_plain(done: Finished, folder: Path) -> dict[str, Any]:
    return json.loads(
        (folder / done.out.splitlines()[-1].removeprefix("run folder: ") / "collectives.json").read_text()
    )


@pytest.mark.ranks
def test_the_rate_of_a_link_between_hosts_is_found(tmp_path: Path) -> None:
    """Ranks that are hardly given the processor cannot fill a link; then one that takes less of it is measured."""
    found = []
    for megabits, sizes in ((200, "1MB,2MB"), (40, "512KB,1MB"), (8, "256KB,512KB")):
        words = ("--sizes", sizes, "--operations", "all_reduce", "--trials", "3", "--seconds", "4")
        plain = read_plain(bench_hosts(f"{megabits}mbit", tmp_path, *words), tmp_path)
        found.append((megabits, plain["link"]["wire_bits_per_second"]))
        if found[-1][1] == pytest.approx(megabits * 1e6, rel=0.05):
            return
    pytest.fail(f"none of the rates was found: {found}")


@pytest.mark.ranks
@pytest.mark.slow
def test_the_rate_of_a_fast_link_is_found_with_all_sizes_and_operations(tmp_path: Path) -> None:
    for _ in range(3):  # ranks that are not given the processor cannot fill the link
        done = bench_hosts("1gbit", tmp_path)
        plain = read_plain(done, tmp_path)
        if plain["link"]["wire_bits_per_second"] == pytest.approx(1e9, rel=0.05):
            break
    assert plain["link"]["wire_bits_per_second"] == pytest.approx(1e9, rel=0.05)
    assert "links between hosts carry 1" in done.out
    (line,) = [each for each in plain["lines"] if each["operation"] == "all_reduce"]
    assert 8 * line["bus_bytes_per_second"] * 1514 / 1448 == pytest.approx(1e9, rel=0.05)
