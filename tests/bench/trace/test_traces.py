"""Traces on made-up events: clocks, nesting, numbers, and what a summary says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from trace_rules import GLOO, HOST, MAIN, OTHER_STREAM, check_rules, file_of, kernel, part, read_file, span

from tutti.bench.trace.horovod import find_waits, read_tensors, read_timeline, write_horovod_summary
from tutti.bench.trace.spans import Span, Trace, innermost, intersect, subtract, total, trace_of, union
from tutti.bench.trace.summary import RankSummary, TracedSteps, arrivals, parse_steps, summarise
from tutti.bench.trace.text import write_summary
from tutti.bench.trace.timeline import ClockOffset, ClockReading, RankTrace, clock_of, nested, offset_of, write_timeline
from tutti.errors import ConfigError
from tutti.horovod.engine.coordination import Timeline
from tutti.horovod.engine.messages import TensorRequest

BASE = 1_700_000_000_000_000_000
ONE_CLOCK = ClockOffset(0, 0, 0)


def test_times_count_from_the_base_of_a_file_or_from_1970() -> None:
    relative = trace_of(file_of(span("aten::mm", 10.5, 12.25)))
    absolute = trace_of({"traceEvents": [span("aten::mm", BASE / 1000 + 10.5, BASE / 1000 + 12.25)]})
    for trace in (relative, absolute):
        assert [(s.begin - BASE, s.end - s.begin) for s in trace.spans()] == [(10_500, 1_750)]
    with_a_base_that_does_not_count = {
        "baseTimeNanoseconds": BASE,
        "traceEvents": [span("a", BASE / 1000, BASE / 1000)],
    }
    assert trace_of(with_a_base_that_does_not_count).begin == BASE


def test_events_about_the_profiler_itself_are_left_out() -> None:
    assert [event["name"] for event in trace_of(file_of(span("aten::mm", 1, 2))).events] == ["aten::mm"]


def test_intervals_are_added_cut_and_taken_away() -> None:
    left, right = union([(5, 9), (0, 2), (1, 3), (4, 4)]), union([(2, 6), (8, 12)])
    assert left == [(0, 3), (5, 9)]
    assert intersect(left, right) == [(2, 3), (5, 6), (8, 9)]
    assert subtract(left, right) == [(0, 2), (6, 8)]
    assert subtract(left, []) == left
    assert subtract([], right) == []
    assert total(left) == 7


def test_a_moment_belongs_to_the_innermost_span() -> None:
    outer, inner, late = (Span(n, "cpu_op", (1, 1), b, e) for n, b, e in (("o", 0, 10), ("i", 2, 5), ("l", 8, 12)))
    alone = Span("a", "cpu_op", (1, 1), 20, 21)
    pieces = [(begin, end, found.name) for begin, end, found in innermost([alone, late, inner, outer])]
    assert pieces == [(0, 2, "o"), (2, 5, "i"), (5, 8, "o"), (8, 10, "l"), (20, 21, "a")]


def test_spans_that_do_not_nest_are_cut_or_get_a_lane_of_their_own() -> None:
    events = trace_of(file_of(span("outer", 0, 10), span("slightly over", 5, 10.5), span("beside", 6, 30))).events
    placed = {event["name"]: (lane, event["dur"]) for _, lane, event in nested(events)}
    assert placed == {"outer": (0, 10_000), "slightly over": (0, 5_000), "beside": (1, 24_000)}


def a_rank(ahead_microseconds: float = 0.0) -> dict[str, Any]:
    """Two ranks have the same numbers: those of processes, threads, flows."""
    flow = {"pid": HOST, "tid": MAIN, "cat": "fwdbwd", "name": "fwdbwd", "id": 3}
    allocated = {"Total Allocated": 4_000_000, "Bytes": 4_000_000, "Device Id": -1}
    events = [
        part("step 1", 0, 100),
        span("aten::mm", 10, 30, **{"External id": 5}),
        span("aten::mm", 50, 70, **{"External id": 6}),
        span("gloo:all_reduce", 60, 95, "user_annotation", GLOO),
        kernel("gemm", 20, 40),
        flow | {"ph": "s", "ts": 10.0},
        flow | {"ph": "f", "ts": 50.0, "bp": "e"},
        {"ph": "i", "s": "t", "name": "[memory]", "pid": HOST, "tid": MAIN, "ts": 15.0, "args": allocated},
    ]
    return file_of(*(event | {"ts": event["ts"] + ahead_microseconds} for event in events))


def test_a_timeline_has_a_row_a_rank_on_one_clock_and_no_number_twice(tmp_path: Path) -> None:
    ahead = 5_000_000.0
    traces = [trace_of(a_rank()), trace_of(a_rank(ahead))]
    clocks = [ONE_CLOCK, ClockOffset(round(ahead * 1000), 40_000, round(ahead * 1000))]
    parts = [RankTrace(r, f"h{r}", clocks[r], traces[r].begin, lambda r=r: traces[r]) for r in (0, 1)]
    path = tmp_path / "timeline.json.gz"
    write_timeline(path, parts, (1, 1))
    content = read_file(path)
    check_rules(content)
    assert content["baseTimeNanoseconds"] == BASE
    assert content["metadata"]["clocks"][1] == {
        "rank": 1,
        "host": "h1",
        "offset_microseconds": 5e6,
        "uncertainty_microseconds": 40.0,
        "measured_microseconds": 5e6,
    }
    events = content["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(named.values()) == ["rank 0 on host h0", "rank 1 on host h1"]
    for process in named:
        threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == process]
        assert threads == ["main thread", "pt_gloo_runloop", "GPU 0 stream 7"]
        steps = [(e["ts"], e["dur"]) for e in events if e["name"] == "step 1" and e["pid"] == process]
        assert steps == [(0.0, 100.0)]
    assert len({e["id"] for e in events if e["ph"] in "sf"}) == 2
    assert len({e["args"]["External id"] for e in events if e["name"] == "aten::mm"}) == 4
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"allocated MB": 4.0}] * 2


def test_the_rules_are_broken_by_traces_that_a_viewer_would_not_show() -> None:
    names = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "t"}}]
    over = [span("a", 0, 10) | {"pid": 1, "tid": 1}, span("b", 5, 12) | {"pid": 1, "tid": 1}]
    with pytest.raises(AssertionError, match="b outlasts a"):
        check_rules({"traceEvents": [*names, *over]})


def test_the_shortest_round_trip_gives_the_clock_offset() -> None:
    slow, quick = (
        ClockReading(sent=1_000, answered=5_000, received=9_000),
        ClockReading(sent=20_000, answered=15_100, received=20_400),
    )
    assert offset_of([slow, quick]) == (5_100, 200)
    assert clock_of((100, 20), (140, 10), shared=False) == ClockOffset(120, 40, 120)
    assert clock_of((100, 20), (140, 10), shared=True) == ClockOffset(0, 0, 120)


def on_cpu() -> RankSummary:
    """100 microseconds: 50 of operators, 40 of communication, 20 of them beside operators, 30 of nothing."""
    return summarise(
        trace_of(
            file_of(
                span("outside", -20, -10),
                part("step 4", 0, 100),
                part("forward", 0, 40),
                span("aten::linear", 10, 30),
                span("aten::addmm", 15, 25),
                part("backward", 40, 90),
                span("AddmmBackward0", 40, 70),
                span("gloo:all_reduce", 50, 90, "user_annotation", GLOO),
                span("aten::_local_scalar_dense", 30, 30),
            )
        ),
        rank=0,
        host="h0",
    )


def test_on_a_cpu_operators_hide_communication() -> None:
    found = on_cpu()
    assert (found.window, found.compute, found.communication) == (100_000, 50_000, 40_000)
    assert (found.hidden, found.exposed, found.idle) == (20_000, 20_000, 30_000)
    assert found.steps == {4: 100_000}
    assert (found.parts["forward"], found.parts["backward"], found.parts["data loading"]) == (40_000, 50_000, 0)


def test_an_operator_has_its_own_time_without_what_it_calls() -> None:
    found = {row.name: (row.calls, row.nanoseconds) for row in on_cpu().operators}
    assert found["aten::linear"] == (1, 10_000) and found["aten::addmm"] == (1, 10_000)
    assert next(iter(found)) == "AddmmBackward0"


def test_communication_inside_an_operator_is_not_hidden_by_it() -> None:
    events = [
        part("step 1", 0, 100),
        span("evaluate_function", 0, 100),
        span("memory:all_reduce", 20, 80, "user_annotation"),
    ]
    found = summarise(trace_of(file_of(*events)), 0, "h0")
    assert (found.compute, found.communication, found.exposed, found.idle) == (40_000, 60_000, 60_000, 0)


def test_an_operator_that_waits_for_communication_does_not_hide_it() -> None:
    events = [
        part("step 1", 0, 100),
        span("c10d::allreduce_", 10, 90),
        span("gloo:all_reduce", 20, 80, "user_annotation", GLOO),
    ]
    found = summarise(trace_of(file_of(*events)), 0, "h0")
    assert (found.compute, found.communication, found.exposed, found.idle) == (0, 80_000, 80_000, 20_000)
    assert [name for name, _ in found.collectives] == ["gloo:all_reduce"]


def test_communication_begins_where_it_is_asked_for() -> None:
    events = [
        part("step 1", 0, 100),
        span("c10d::allreduce_", 10, 12),
        span("aten::mm", 12, 30),
        span("c10d::allreduce_", 30, 32),
        span("gloo:all_reduce", 40, 60, "user_annotation", GLOO),
        span("gloo:all_reduce", 60, 110, "user_annotation", GLOO),  # its thread is told after the step has gone on
    ]
    found = summarise(trace_of(file_of(*events)), 0, "h0")
    assert [(begin - BASE, end - BASE) for _, (begin, end) in found.collectives] == [
        (10_000, 60_000),
        (30_000, 110_000),
    ]
    assert (found.compute, found.communication, found.exposed, found.idle) == (18_000, 90_000, 72_000, 10_000)
    assert found.compute + found.exposed + found.idle == found.window


def on_gpu() -> RankSummary:
    return summarise(
        trace_of(
            file_of(
                part("step 7", 0, 60),
                part("forward", 0, 30),
                span("aten::mm", 5, 10),
                span("cudaLaunchKernel", 6, 8, "cuda_runtime"),
                part("optimizer", 30, 60),
                span("aten::item", 32, 58),
                span("cudaStreamSynchronize", 33, 58, "cuda_runtime"),
                kernel("gemm", 10, 40),
                kernel("ncclDevKernel_AllReduce", 30, 70, OTHER_STREAM),
                kernel("adam", 90, 100),
            )
        ),
        rank=0,
        host="h0",
    )


def test_on_a_gpu_kernels_hide_communication_and_the_rest_is_idle() -> None:
    found = on_gpu()
    assert found.window == 100_000  # to the end of the last kernel
    assert (found.compute, found.communication, found.exposed) == (40_000, 40_000, 30_000)
    assert found.idle == 30_000
    assert [row.name for row in found.kernels] == ["ncclDevKernel_AllReduce", "gemm", "adam"]
    assert [(row.name, row.nanoseconds) for row in found.waits] == [("cudaStreamSynchronize", 25_000)]


def test_gaps_name_what_the_host_did() -> None:
    longest, second = on_gpu().gaps
    assert (longest.step, longest.nanoseconds, longest.meanwhile) == (7, 20_000, "nothing that was traced")
    assert (second.step, second.part, second.nanoseconds) == (7, "forward", 10_000)
    assert second.meanwhile == "Python in forward"


def test_a_gap_over_two_parts_belongs_to_the_one_with_more_of_it() -> None:
    events = [part("step 1", 0, 100), part("data loading", 0, 40), part("forward", 40, 100), span("aten::mm", 0, 30)]
    (gap,) = summarise(trace_of(file_of(*events)), 0, "h0").gaps
    assert (gap.part, gap.nanoseconds, gap.meanwhile) == ("forward", 70_000, "Python in forward")


def test_the_rank_that_comes_last_is_found_on_one_clock() -> None:
    early = on_cpu()
    late = summarise(
        trace_of(file_of(part("step 4", 0, 100), span("gloo:all_reduce", 5_060, 5_090, "user_annotation", GLOO))),
        1,
        "h1",
    )
    assert arrivals([early, late], [0, 0]) == []  # it began after the step: ranks differ in their collectives
    late = summarise(
        trace_of(file_of(part("step 4", 0, 100), span("gloo:all_reduce", 30, 90, "user_annotation", GLOO))), 1, "h1"
    )
    came = arrivals([early, late], [0, -40_000])  # the clock of rank 1 is 40 microseconds behind
    assert [[time - BASE for time in times] for times in came] == [[50_000, 70_000]]
    text = write_summary("title", [early, late], [0, -40_000])
    assert "Rank 1 on h1 was the last to begin 1 of 1 collectives" in text


def test_memory_is_reported_by_device() -> None:
    def allocation(time: float, size: int, allocated: int) -> dict[str, Any]:
        arguments = {"Total Allocated": allocated, "Bytes": size, "Device Id": 0}
        return {"ph": "i", "s": "t", "name": "[memory]", "pid": HOST, "tid": MAIN, "ts": time, "args": arguments}

    events = [part("step 1", 0, 10), allocation(1, 100, 900), allocation(2, -100, 800), allocation(99, 1, 5_000)]
    (found,) = summarise(trace_of(file_of(*events)), 0, "h0").memory
    assert (found.device, found.peak, found.allocations, found.allocated) == ("GPU 0", 900, 1, 100)


def test_the_summary_is_in_milliseconds_a_step() -> None:
    text = write_summary("digits: step 4", [on_cpu()], [0])
    assert text.startswith("digits: step 4\n")
    assert re.search(r"^0 on h0 +0\.10 +0\.04 +0\.05 +0\.05 +0\.04 +0\.02 +0\.03$", text, re.MULTILINE)
    assert "hidden behind compute and 0.02 exposed (20.0% of a step)" in text
    assert re.search(r"^aten::linear +1\.0 +0\.01 +10\.0%$", text, re.MULTILINE)
    assert "GPU" not in text
    assert "Kernels and copies on the GPU" in write_summary("nbody", [on_gpu()], [0])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("5", "--steps 5: expected FIRST:LAST, two numbers of steps. Try --steps 20:25."),
        ("a:b", "--steps a:b: expected FIRST:LAST"),
        ("10:5", "--steps 10:5: the first step comes after the last. Try --steps 5:10."),
        ("0:3", "--steps 0:3: steps are counted from 1. Try --steps 1:3."),
    ],
)
def test_steps_that_are_none_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse_steps(text)


def test_steps_beyond_the_end_of_a_recipe_are_refused() -> None:
    TracedSteps(*parse_steps("3:20")).check_end(20)
    with pytest.raises(ConfigError, match="--steps 3:21: the recipe ends with step 20"):
        TracedSteps(3, 21).check_end(20)


def horovod_timeline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of which rank 1 is late for both together, and then rank 0 for one."""
    now = 0.0
    monkeypatch.setattr("tutti.horovod.engine.coordination.time.monotonic", lambda: now)
    first, second = (TensorRequest("allreduce", name, dtype="float32", shape=(4,)) for name in ("grad.a", "grad.b"))
    timeline = Timeline()
    timeline.start(str(path), marks_cycles=True)
    now = 1.0
    timeline.submitted([first, second], 0)
    timeline.cycle()
    now = 1.5
    timeline.submitted([first, second], 1)
    timeline.granted([first, second])
    timeline.began([first, second])
    now = 1.6
    timeline.ended([first, second])
    timeline.submitted([first], 1)
    now = 1.7
    timeline.submitted([first], 0)
    timeline.granted([first])
    timeline.stop()


def test_a_horovod_timeline_names_the_ranks_that_were_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timeline.json"
    horovod_timeline(path, monkeypatch)
    tensors = read_tensors(read_timeline(path))
    assert [tensor.name for tensor in tensors] == ["allreduce.grad.a", "allreduce.grad.b"]
    assert [len(tensor.negotiations) for tensor in tensors] == [2, 1]
    assert [round(tensor.work[0]) for tensor in tensors] == [100_000, 100_000]
    waits = find_waits(tensors)
    assert [(wait.rank, round(wait.microseconds), wait.tensors) for wait in waits] == [
        (1, 500_000, ("allreduce.grad.a", "allreduce.grad.b")),
        (0, 100_000, ("allreduce.grad.a",)),
    ]
    text = write_horovod_summary("script.py on 2 rank(s)", tensors)
    assert re.search(r"^ +0\.000 +500\.00 +1  allreduce\.grad\.a and 1 more$", text, re.MULTILINE)
    assert re.search(r"^rank 1 +1 +50% +500\.00$", text, re.MULTILINE)


def test_a_horovod_timeline_that_was_cut_off_is_read_to_its_last_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "timeline.json"
    horovod_timeline(path, monkeypatch)
    whole = json.loads(path.read_text())
    path.write_text(path.read_text()[:-30])
    assert read_timeline(path) == whole[:-1]


def test_a_trace_without_events_begins_nowhere() -> None:
    assert Trace([]).begin == 0
