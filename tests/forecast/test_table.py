"""Tables of measurements: what is read, and what is refused with its reason."""

from pathlib import Path

import pytest

from tutti.bench.collectives.results import Measured, Results
from tutti.errors import ConfigError, TuttiError
from tutti.forecast.curve import ScalingCurve
from tutti.forecast.link import given_link, measured_link, parse_link, parse_size, two_node_level
from tutti.forecast.table import check_curve, read_table
from tutti.study.definition import Mode

HEAD = "ranks,nodes,samples_per_second\n"
BATCHES = "ranks,nodes,samples_per_second,per_rank_batch\n"
GOOD = "1,1,100\n4,1,380\n8,2,730\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "points.csv"
    path.write_text(text)
    return path


def read(folder: Path, text: str, mode: Mode = "weak") -> ScalingCurve:
    path = write(folder, text)
    return check_curve(read_table(path), mode, None, f"--table {path}")


def test_a_table_is_read_with_its_optional_columns(tmp_path: Path) -> None:
    curve = read(
        tmp_path, "ranks, nodes, samples_per_second, per_rank_batch, exposed_seconds\n1,1,100,8,\n2,2,190,8,0.01\n"
    )
    first, second = curve.measurements
    assert (first.per_rank_batch, first.exposed_seconds) == (8, None)
    assert second.exposed_seconds == 0.01
    assert curve.ranks_per_node == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["there is no row"]),
        (HEAD, ["there is no row"]),
        (HEAD + "4,1,380\n", ["1 measurement", "at least two"]),
        (HEAD + "8,2,730\n4,1,380\n", ["4 ranks after 8", "Sort the table"]),
        (HEAD + GOOD + "8,2,720\n", ["8 ranks on 2 nodes occurs twice", "median"]),
        (HEAD + "0,1,100\n4,1,380\n", ["line 2", "ranks=0", "at least 1"]),
        (HEAD + "-4,1,100\n4,1,380\n", ["ranks=-4"]),
        (HEAD + "1.5,1,100\n4,1,380\n", ["ranks=1.5", "whole number"]),
        ("ranks,samples_per_second\n1,100\n", ["column nodes is missing", "given are ranks, samples_per_second"]),
        ("ranks,nodes,samples_per_sec\n1,1,100\n", ["samples_per_second is missing", "Did you mean"]),
        (HEAD + "1,1,nan\n4,1,380\n", ["samples_per_second=nan", "expected a number"]),
        (HEAD + "1,1,\n4,1,380\n", ["samples_per_second=(nothing)"]),
        (HEAD + "1,1,0\n4,1,380\n", ["samples_per_second=0", "more than 0"]),
        (HEAD + "4,1,380\n8,3,730\n", ["8 ranks on 3 nodes", "4 ranks a node", "(2 nodes)"]),
        (HEAD + "2,4,190\n8,4,730\n", ["2 ranks on 4 nodes"]),
        (HEAD + "1,1,100\n4,1,480\n", ["efficiency of 120%", "at most 110%", "1 rank on 1 node"]),
        (
            BATCHES + "1,1,100,8\n4,1,380,16\n",
            ["8, 16 are mixed", "--mode strong"],
        ),
        (BATCHES + "1,1,100,8\n4,1,380,\n", ["some rows alone"]),
        (BATCHES + "1,1,100,-8\n4,1,380,-8\n", ["per_rank_batch above 0"]),
    ],
)
def test_a_bad_table_is_refused_with_its_reason(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(TuttiError) as caught:
        read(tmp_path, text)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


def test_strong_scaling_needs_one_global_batch(tmp_path: Path) -> None:
    assert read(tmp_path, BATCHES + "1,1,100,64\n4,2,350,16\n", "strong").mode == "strong"
    with pytest.raises(TuttiError, match=r"global batches of 64 to 128.*--mode weak"):
        read(tmp_path, BATCHES + "1,1,100,64\n4,2,350,32\n", "strong")


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TuttiError, match="cannot be read"):
        read_table(tmp_path / "nothing.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(TuttiError):
        read_table(tmp_path / "bytes.csv")


def test_a_link_is_read_with_its_units() -> None:
    link = parse_link("200Gbit,3us")
    assert link.bytes_per_second == pytest.approx(25e9)
    assert link.latency_seconds == pytest.approx(3e-6)
    assert parse_link("25 GB/s, 0.003 ms") == link
    assert parse_size("1.5MiB") == 1.5 * 2**20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("200,3us", ["200 is no number with a unit", "gbit", "200Gbit,3us"]),
        ("200Gbit,3", ["3 is no number with a unit"]),
        ("200Gbit", ["expected RATE,LATENCY"]),
        ("0Gbit,3us", ["0Gbit"]),
        ("1.2.3Gbit,3us", ["1.2.3Gbit"]),
    ],
)
def test_a_link_without_a_unit_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_link(text)
    assert all(word in str(caught.value) for word in words)


def test_a_slow_link_makes_a_slow_step(tmp_path: Path) -> None:
    curve = read(tmp_path, BATCHES + "1,1,100,10\n4,1,400,10\n")
    slow, fast = (two_node_level(curve, given_link(curve, text, 1e8)) for text in ("1Gbit,50us", "200Gbit,3us"))
    assert slow.log_time > fast.log_time + 0.5
    assert slow.nodes == 2
    with pytest.raises(ConfigError, match="--gradients BYTES"):
        given_link(curve, "1Gbit,50us", None)


def write_collectives(folder: Path, hosts: list[str], rate: float) -> Path:
    points = [
        Measured("all_reduce", n, len(set(hosts[:n])), size, 1, (2 * (n - 1) / n * size / rate,) * 3)
        for n in range(2, len(hosts) + 1)
        for size in (1 << 18, 1 << 20, 1 << 25)
    ]
    folder.mkdir()
    Results({"hosts": hosts, "backend": "gloo", "device": "cpu"}, points, []).write(folder)
    return folder


def test_measured_collectives_say_what_a_given_link_does(tmp_path: Path) -> None:
    curve = read(tmp_path, BATCHES + "1,1,100,10\n2,1,200,10\n")
    across = write_collectives(tmp_path / "across", ["n1", "n1", "n2", "n2"], 1.25e8)
    measured = two_node_level(curve, measured_link(curve, across, 1e8))
    given = two_node_level(curve, given_link(curve, "1Gbit,1us", 1e8))
    assert measured.log_time == pytest.approx(given.log_time, abs=0.02)
    alone = write_collectives(tmp_path / "alone", ["n1", "n1"], 1.25e8)
    with pytest.raises(ConfigError, match=r"all ranks were on one host.*on 2 nodes"):
        measured_link(curve, alone, 1e8)
