"""The timeline: a file that a trace viewer opens, whatever happens to the job."""

import json
from pathlib import Path
from typing import Any

import hvd_sets_work as work
import pytest
from rank_jobs import run_ranks
from waiting import wait_until

from tutti.horovod.engine import coordination
from tutti.horovod.engine.coordination import Timeline
from tutti.horovod.engine.messages import TensorRequest

pytestmark = pytest.mark.ranks


def rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of each row, which are in the order of time."""
    events = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] != "M":
            found[names[event["pid"]]].append(event)
    for each in found.values():
        times = [event["ts"] for event in each]
        assert times == sorted(times)
    return found


def story(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(event["ph"], event["name"]) for event in events]


def was_done(kind: str, events: list[dict[str, Any]], times: int = 1) -> None:
    """Each time: begun by the first rank, ready on all, and done; the next may begin while it is."""
    told = story([event for event in events if event["tid"] == 0])
    assert story([event for event in events if event["tid"] == 1]) == [("B", kind), ("E", kind)] * times
    assert len(told) == 5 * times
    for begin in range(0, len(told), 5):
        assert told[begin] == ("B", f"NEGOTIATE_{kind}") and told[begin + 4] == ("E", f"NEGOTIATE_{kind}")
        assert sorted(told[begin + 1 : begin + 4]) == [("i", "0"), ("i", "1"), ("i", "2")]


@pytest.mark.parametrize("marks", ["0", "1"])
def test_every_tensor_has_a_row_with_who_came_when_and_the_work(marks: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    variables = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": marks}
    run_ranks(3, work.write_a_timeline, str(tmp_path), variables)
    found = rows(path)
    twice = found['allreduce.x"y']
    was_done("ALLREDUCE", twice, times=2)
    given = [event["args"] for event in twice if event["ph"] == "B"]
    assert given == [{"dtype": "float32", "shape": [2, 3]}] * 4
    was_done("ALLGATHER", found["allgather.rows"])
    was_done("ALLREDUCE", found["allreduce.g_1of2"])
    was_done("ALLREDUCE", found["allreduce.g_2of2"])
    was_done("BARRIER", found["barrier.noname"])
    assert story(found["allreduce.wrong"])[4:] == [("E", "NEGOTIATE_ALLREDUCE")]  # it was refused
    elsewhere = story(found["allreduce.x of process set 1"])
    assert elsewhere[0][0] == "B" and elsewhere[-1] == ("E", "NEGOTIATE_ALLREDUCE")  # rank 0 is not in it
    assert sorted(elsewhere[1:3]) == [("i", "1"), ("i", "2")]
    assert [name for name in found if name.startswith("join.")]
    assert bool(found["cycles"]) == (marks == "1")
    assert {name for _, name in story(found["cycles"])} <= {"CYCLE_START"}
    assert (tmp_path / "while the job is open").read_bytes() == path.read_bytes()


def test_timelines_are_started_and_stopped_by_hand(tmp_path: Path) -> None:
    first, second = run_ranks(2, work.write_timelines_by_hand, str(tmp_path))
    assert first[0] == first[1] == ("ValueError", "Horovod has not been initialized; use hvd.init().")
    assert first[2][0] == "ValueError" and "Set it to DYNAMIC" in first[2][1]
    assert first[3][0] == "ValueError" and "expected a file that can be written" in first[3][1]
    assert first[-1] == second[-1] == 2.0
    for place in range(3):
        found = rows(tmp_path / f"{place}.json")
        assert f"allreduce.x{place}" in found and f"allreduce.before{place}" not in found
        assert bool(found["cycles"]) == (place == 1)


def test_a_timeline_that_cannot_be_written_does_not_stop_the_job() -> None:
    assert run_ranks(2, work.write_a_timeline_nowhere) == [2.0, 2.0]


def test_events_are_in_the_file_soon_and_the_file_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that stalls, or is killed, writes no later event."""
    monkeypatch.setattr(coordination, "FLUSH_SECONDS", 0.01)
    timeline, path = Timeline(), tmp_path / "timeline.json"
    timeline.start(str(path), marks_cycles=False)
    for place in range(3):
        timeline.submitted([TensorRequest("allreduce", f"x{place}", dtype="int8", shape=(2,))], 0)
        wait_until(lambda place=place: f"allreduce.x{place}" in path.read_text(), lambda: path.read_text())
        wait_until(lambda: path.read_text().endswith("\n]\n"), lambda: path.read_text())  # the write is complete
        assert story(rows(path)[f"allreduce.x{place}"]) == [("B", "NEGOTIATE_ALLREDUCE"), ("i", "0")]
    killed = path.read_bytes()
    timeline.stop()
    assert path.read_bytes() == killed


def test_what_began_before_the_file_does_not_end_in_it(tmp_path: Path) -> None:
    timeline, request = Timeline(), TensorRequest("allreduce", "x", dtype="int8", shape=(2,))
    timeline.submitted([request], 0)
    timeline.stop()
    timeline.start(str(tmp_path / "a"), marks_cycles=False)
    timeline.granted([request])
    timeline.cycle()
    timeline.submitted([request], 1)
    timeline.stop()
    timeline.granted([request])
    assert {name: story(events) for name, events in rows(tmp_path / "a").items()} == {
        "cycles": [],
        "allreduce.x": [("B", "NEGOTIATE_ALLREDUCE"), ("i", "1")],
    }
