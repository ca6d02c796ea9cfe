"""What a study of ranks measured, by plain arithmetic on its run folders, and what its report shows of it."""

import csv
import html
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import Browser

PHASES = {
    "data loading": ("data",),
    "compute": ("forward", "backward", "update"),
    "communication": ("communication",),
    "straggler": ("waiting",),
    "other": ("rest",),
}
COLUMNS = {
    "data loading": "reading_share",
    "compute": "computing_share",
    "communication": "communication_share",
    "straggler": "waiting_share",
    "other": "rest_share",
}
_TABLE = """
(title => {
  const table = document.querySelector(`section[aria-labelledby="${title}"] table`);
  const titles = [...table.tHead.rows[0].cells].map(cell => cell.innerText.trim());
  return [...table.tBodies[0].rows].map(
    row => Object.fromEntries([...row.cells].map((cell, place) => [titles[place], cell.innerText.trim()])));
})
"""
_TRACES = """
Object.fromEntries([...document.querySelectorAll('.plot')].map(
  plot => [plot.id, plot.data.map(trace => ({name: trace.name, x: [...trace.x], y: [...trace.y]}))]))
"""
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


@dataclass(frozen=True)
class Run:
    """One run, from its own files alone."""

    id: str
    ranks: int
    global_batch: int
    steps: list[int]  # at the ends of its windows after the warm-up
    speeds: list[float]  # samples/s of each
    seconds: list[float]
    phases: dict[str, list[float]]  # seconds, by the names of a report
    losses: dict[int, float]  # by step, those of the warm-up too
    last_step: int

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    def share(self, part: str) -> float:
        return sum(self.phases[part]) / sum(self.seconds)


@dataclass(frozen=True)
class Size:
    """All runs on one number of ranks."""

    ranks: int
    runs: list[Run]

    @property
    def speed(self) -> float:
        return statistics.median(run.speed for run in self.runs)

    @property
    def communication(self) -> float:
        """As a share of a step: the median over runs of the median over their windows."""
        return statistics.median(
            statistics.median(p / s for p, s in zip(run.phases["communication"], run.seconds, strict=True))
            for run in self.runs
        )

    def share(self, part: str) -> float:
        return sum(sum(run.phases[part]) for run in self.runs) / sum(sum(run.seconds) for run in self.runs)


@dataclass(frozen=True)
class Shown:
    """A report as a browser shows it."""

    settings: list[dict[str, str]]
    points: dict[str, dict[str, str]]
    traces: dict[str, list[dict[str, Any]]]


def read_run(folder: Path, warmup_steps: int) -> Run:
    """The windows of a run after the warm-up, and never the first step."""
    record = json.loads((folder / "record.json").read_text())
    batch = record["plan"]["per_rank_batch"] * record["ranks"]
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = [event for event in events if event["event"] == "step"]
    ends = [0, *(event["step"] for event in events)]
    kept = [
        (event, event["step"] - before)
        for event, before in zip(events, ends, strict=False)
        if event["step"] > max(1, warmup_steps)
    ]
    phases = {
        part: [sum((event.get(f"{name}_seconds", 0.0) for name in names), 0.0) for event, _ in kept]
        for part, names in PHASES.items()
    }
    return Run(
        folder.name,
        record["ranks"],
        batch,
        [event["step"] for event, _ in kept],
        [batch * steps / event["seconds"] for event, steps in kept],
        [event["seconds"] for event, _ in kept],
        phases,
        {event["step"]: event["loss"] for event in events},
        record["step"],
    )


def read_sizes(study: Path, warmup_steps: int) -> list[Size]:
    """All runs of a study, by their number of ranks."""
    runs = [read_run(folder, warmup_steps) for folder in sorted((study / "points").iterdir())]
    return [Size(n, [run for run in runs if run.ranks == n]) for n in sorted({run.ranks for run in runs})]


def figures_in(page: Path) -> dict[str, dict[str, Any]]:
    """The charts of a page as they are written in it, by their names."""
    found = re.search(r'<script id="figures" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return {figure["id"]: figure for figure in json.loads(found[1])}


def rows_in(page: Path, section: str) -> list[dict[str, str]]:
    """The cells of a table of a page as they are written in it, by the titles of their columns."""
    text = page.read_text().partition(f'id="{section}"')[2].partition("</table>")[0]
    titles = [_text(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", text, re.DOTALL)]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in text.partition("<tbody>")[2].split("</tr>")]
    return [dict(zip(titles, map(_text, row), strict=True)) for row in rows if row]


def lines_in(points: Path) -> list[dict[str, str]]:
    """The lines of a CSV file."""
    with open(points, newline="") as file:
        return list(csv.DictReader(file))


def look_at(browser: Browser, page: Path) -> Shown:
    """Open a report, and read its tables and what its charts have drawn."""
    browser.resize(1280, 900)
    browser.open(page)
    assert browser.complaints == []
    points = browser.evaluate(f"{_TABLE}('points-title')")
    return Shown(
        browser.evaluate(f"{_TABLE}('settings-title')"),
        {point["point"]: point for point in points},
        browser.evaluate(_TRACES),
    )


def check_table(sizes: list[Size], shown: Shown) -> None:
    """Speed, speed-up, efficiency, step and communication by number of ranks, to the last digit shown."""
    first = sizes[0]
    assert [row["ranks"] for row in shown.settings] == [str(size.ranks) for size in sizes]
    for size, row in zip(sizes, shown.settings, strict=True):
        batch, speedup = size.runs[0].global_batch, size.speed / first.speed
        assert row["global batch"] == f"{batch:,}"
        assert row["runs (windows)"] == f"{len(size.runs)} ({sum(len(run.steps) for run in size.runs)})"
        assert row["samples/s"].split()[0] == f"{size.speed:,.0f}"
        assert row["speed-up"].split()[0] == f"{speedup:.2f}"
        assert row["efficiency"].split()[0] == f"{100 * speedup * first.ranks / size.ranks:.1f}%"
        assert row["exposed communication"].split()[0] == f"{100 * size.communication:.1f}%"
        number, unit = row["step time"].split()
        assert float(number) * _UNITS[unit] == pytest.approx(batch / size.speed, rel=6e-3)


def check_points(sizes: list[Size], shown: Shown) -> None:
    """Every run by itself."""
    runs = [run for size in sizes for run in size.runs]
    assert set(shown.points) == {run.id for run in runs}
    for run in runs:
        row = shown.points[run.id]
        assert (row["state"], row["ranks"], row["windows"]) == ("finished", str(run.ranks), str(len(run.steps)))
        assert row["samples/s"] == f"{run.speed:,.0f}"
        assert row["range"] == f"{min(run.speeds):,.0f} to {max(run.speeds):,.0f}"
        assert row["communication"] == f"{100 * run.share('communication'):.1f}%"


def check_charts(sizes: list[Size], shown: Shown) -> None:
    """What plotly was given to draw."""
    ranks = [size.ranks for size in sizes]
    ideal = [sizes[0].speed * number / ranks[0] for number in ranks]
    throughput = _by_name(shown.traces["throughput"])
    assert throughput["measured"]["x"] == throughput["ideal"]["x"] == ranks
    assert throughput["measured"]["y"] == pytest.approx([size.speed for size in sizes])
    assert throughput["ideal"]["y"] == pytest.approx(ideal)
    marks = [throughput[name] for name in ("runs, measured", "outliers, measured") if name in throughput]
    for size in sizes:
        drawn = [y for trace in marks for x, y in zip(trace["x"], trace["y"], strict=True) if x == size.ranks]
        assert sorted(drawn) == pytest.approx(sorted(run.speed for run in size.runs))
    efficiency = _by_name(shown.traces["efficiency"])["measured"]
    assert efficiency["y"] == pytest.approx([s.speed / i for s, i in zip(sizes, ideal, strict=True)])
    parts = _by_name(shown.traces["parts"])
    for part in PHASES:
        assert parts[part]["y"] == pytest.approx([size.share(part) for size in sizes], abs=1e-9)
    exposed = _by_name(shown.traces["communication"])["measured"]
    expected = [1e3 * s.communication * s.runs[0].global_batch / s.speed for s in sizes if s.ranks > 1]
    assert exposed["y"] == pytest.approx(expected)


def check_losses(sizes: list[Size], shown: Shown) -> None:
    """A line for each run, with all its steps."""
    runs = [run.losses for size in sizes for run in size.runs]
    drawn = [dict(zip(trace["x"], trace["y"], strict=True)) for trace in shown.traces["losses"]]
    assert len(drawn) == len(runs)
    assert all(any(each == pytest.approx(losses) for each in drawn) for losses in runs)


def check_csv(sizes: list[Size], points: Path) -> None:
    """Every run as a line of plain numbers."""
    lines = {line["id"]: line for line in lines_in(points)}
    runs = [run for size in sizes for run in size.runs]
    assert set(lines) == {run.id for run in runs}
    for run in runs:
        line = lines[run.id]
        assert (line["state"], line["reason"]) == ("finished", "")
        assert [int(line[key]) for key in ("ranks", "global_batch", "per_rank_batch", "windows")] == [
            run.ranks,
            run.global_batch,
            run.global_batch // run.ranks,
            len(run.steps),
        ]
        assert float(line["samples_per_second"]) == pytest.approx(run.speed)
        for part, column in COLUMNS.items():
            assert float(line[column]) == pytest.approx(run.share(part), abs=1e-9)


def _by_name(traces: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in traces}


def _text(cell: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()
