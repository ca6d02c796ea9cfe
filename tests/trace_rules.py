"""Made-up traces, and the rules of the Trace Event format by which a viewer shows all of a file."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

HOST, MAIN, GLOO, GPU, STREAM, OTHER_STREAM = 700, 700, 701, 0, 7, 20


def span(name: str, begin: float, end: float, kind: str = "cpu_op", tid: int = MAIN, **args: Any) -> dict[str, Any]:
    """A span on a thread of the host; in microseconds."""
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": HOST,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def part(name: str, begin: float, end: float) -> dict[str, Any]:
    return span(name, begin, end, "user_annotation")


def kernel(name: str, begin: float, end: float, stream: int = STREAM) -> dict[str, Any]:
    return span(name, begin, end, "kernel", stream) | {"pid": GPU}


def file_of(*events: dict[str, Any], base: int = 1_700_000_000_000_000_000) -> dict[str, Any]:
    """What torch's profiler would write, with what it tells of itself."""
    own = [
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "PyTorch Profiler",
            "ts": 0,
            "dur": 1e6,
        },
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1e6},
        {
            "ph": "M",
            "name": "thread_name",
            "pid": HOST,
            "tid": GLOO,
            "ts": 0,
            "args": {"name": "thread 701 (pt_gloo_runloop)"},
        },
        {"ph": "M", "name": "thread_name", "pid": GPU, "tid": STREAM, "ts": 0, "args": {"name": "stream 7 "}},
    ]
    return {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": [*own, *events]}


def read_file(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return json.load(file)


def check_rules(content: dict[str, Any]) -> None:
    """Times and numbers are there, spans of a thread nest, a thread has one process, flows begin before they end."""
    spans: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    flows: dict[int, list[tuple[str, int, float]]] = defaultdict(list)
    processes: dict[int, set[int]] = defaultdict(set)
    named: set[tuple[int, int]] = set()
    used: set[tuple[int, int]] = set()
    for event in content["traceEvents"]:
        assert event["ph"] in ("X", "i", "M", "s", "t", "f", "C"), event
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int and type(event["tid"]) is int and event["pid"] > 0, event
        where = (event["pid"], event["tid"])
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                named.add(where)
            continue
        assert event["ts"] >= 0, event
        used.add(where)
        processes[event["tid"]].add(event["pid"])
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            spans[where].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif event["ph"] in ("s", "t", "f"):
            flows[event["id"]].append((event["ph"], event["pid"], event["ts"]))
    assert all(len(those) == 1 for those in processes.values())
    assert used <= named
    for those in spans.values():
        _check_nesting(those)
    for those in flows.values():
        assert len({process for _, process, _ in those}) == 1, those
        assert min(those, key=lambda flow: flow[2])[0] == "s", those


def _check_nesting(spans: list[tuple[float, float, str]]) -> None:
    around: list[tuple[float, str]] = []
    for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1][0] <= begin + 1e-4:  # a tenth of what a file can tell
            around.pop()
        if around:
            assert end <= around[-1][0] + 1e-4, f"{name} outlasts {around[-1][1]}"
        around.append((end, name))
