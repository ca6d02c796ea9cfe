"""The report of made-up checks on the screen and in the record."""

import json
from pathlib import Path

import pytest

from tutti.doctor.facts import Facts
from tutti.doctor.findings import fault, name_hosts, warning
from tutti.doctor.plan import Link
from tutti.doctor.report import DoctorReport, print_report, write_record

LINKS = [Link("n0", "n1", 25e6, 24e6, 1e-4), Link("n0", "n2", error="no answer")]


def ranks(hosts: int, on_each: int) -> list[Facts]:
    return [
        Facts(rank=number, host=f"n{number // on_each}", address=f"10.0.0.{number // on_each}", cpus=[0, 1], threads=2)
        for number in range(hosts * on_each)
    ]


def table(report: DoctorReport, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    print_report(report)
    return [line.split() for line in capsys.readouterr().out.splitlines()[:-1]]


def test_the_ranks_of_a_host_are_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(DoctorReport(8, ["n0", "n1"], ranks(2, 4), clocks={"n0": 0.0, "n1": -0.0125}), capsys)
    assert [row[:3] for row in rows] == [
        ["ranks", "host", "address"],
        ["0-3", "n0", "10.0.0.0"],
        ["4-7", "n1", "10.0.0.1"],
    ]
    assert [row[-2:] for row in rows[1:]] == [["+0.0", "ms"], ["-12.5", "ms"]]


def test_of_many_hosts_the_first_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(DoctorReport(100, [f"n{number}" for number in range(100)], ranks(100, 1)), capsys)
    assert len(rows) == 42
    assert " ".join(rows[-1]) == "and 60 more hosts, in the record"


def test_findings_follow_the_table_and_the_last_line_is_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    found = [fault("a link is dead"), warning("a clock is wrong")]
    reduced = [{"bytes": 8, "seconds": 4e-4}, {"bytes": 8_000_000, "seconds": 0.5}]
    print_report(DoctorReport(2, ["n0", "n1"], ranks(2, 1), {}, LINKS, reduced, found, seconds=2.0))
    assert capsys.readouterr().out.splitlines()[3:] == [
        "links: 1 pair of hosts, 192 Mbit/s to 200 Mbit/s (median 200 Mbit/s), round trip 100 us to 100 us",
        "all-reduce of 2 ranks over Gloo: 8 B in 400 us, 7.63 MiB in 500 ms",
        "fault: a link is dead",
        "warning: a clock is wrong",
        "not ready: 1 fault (2 s)",
    ]
    assert DoctorReport(2, ["n0"], ranks(1, 2), findings=[warning("w")]).closing() == "ready: 2 ranks on 1 host"


def test_the_record_has_all_measurements(tmp_path: Path) -> None:
    report = DoctorReport(2, ["n0", "n1"], ranks(2, 1), {"n0": 0.0}, LINKS, [], [fault("f"), warning("w")])
    write_record(report, tmp_path / "doctor.json")
    record = json.loads((tmp_path / "doctor.json").read_text())
    assert (record["ready"], record["faults"], record["warnings"]) == (False, ["f"], ["w"])
    assert record["links"][1]["error"] == "no answer"
    assert [each["host"] for each in record["ranks"]] == ["n0", "n1"]


def test_many_hosts_are_cut_short() -> None:
    assert name_hosts([f"n{number}" for number in range(10)]) == "hosts n0, n1, n2, n3, n4, n5, n6, n7 and 2 more"
