"""The report of a study: its numbers are those of the run folders, also with failed or missing points."""

import csv
import html
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Tutti, command
from study_folders import Made, scale_study, spread, sweep_study

from tutti.errors import Cause, FolderError
from tutti.forecast.forecast import fit_curve, forecast
from tutti.forecast.kept import keep
from tutti.forecast.population import Fabric
from tutti.forecast.studies import read_study as read_measured
from tutti.report.study.charts import Chart, ChartAxis, Curve, log_axis
from tutti.report.study.pictures import draw_charts
from tutti.report.study.tables import points_csv
from tutti.report.study.write import StudyReport, read_study, write_report
from tutti.study.definition import Goal, Point, PointState, StudyFolder

pytestmark = pytest.mark.xdist_group("study_report")
TAGS = re.compile(r"<[^>]+>")


def figures(page: Path) -> dict[str, dict[str, Any]]:
    found = re.search(r'<script id="figures" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return {figure["id"]: figure for figure in json.loads(found[1])}


def rows(page: Path, title: str) -> list[list[str]]:
    """The texts of the cells of the table below a heading."""
    section = page.read_text().partition(f'id="{title}"')[2].partition("</section>")[0]
    body = section.partition("<tbody>")[2].partition("</tbody>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in body.split("</tr>")]
    return [[html.unescape(TAGS.sub("", cell)) for cell in row] for row in cells if row]


def speed_of(run: Path) -> float:
    """The median samples/s of a run's windows after 10 steps, by hand."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(e["samples_per_second"] for e in events if e["event"] == "step" and e["step"] > 10)


def some(point: Point) -> Made | None:
    """Scaling with a cost; on 8 ranks the second repeat failed and the third has not run."""
    if point.ranks == 8 and point.repeat == 2:
        return Made(state=PointState("failed", "rank 3: out of <memory>", 2), cause=Cause.OUT_OF_MEMORY, windows=1)
    if point.ranks == 8 and point.repeat == 3:
        return None
    exposed = 0.01 * 2 * (point.ranks - 1) / point.ranks
    return Made(32 * point.ranks / (0.05 + exposed), exposed / (0.05 + exposed), noise=0.02)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return scale_study(tmp_path_factory.mktemp("report") / "weak", some, repeats=3)


@pytest.fixture(scope="module")
def report(study: StudyFolder) -> StudyReport:
    return write_report(study.path)


@pytest.fixture
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take most of the time of a report: a test that looks at the page alone does without."""
    monkeypatch.setattr("tutti.report.study.write.draw_charts", lambda charts, folder: folder.mkdir(exist_ok=True))


def test_throughput_and_efficiency_are_those_of_the_run_folders(study: StudyFolder, report: StudyReport) -> None:
    repeats = {1: (1, 2, 3), 2: (1, 2, 3), 4: (1, 2, 3), 8: (1,)}
    speeds = {
        n: statistics.median(speed_of(study.points / f"n{n}-r{repeat}") for repeat in of) for n, of in repeats.items()
    }
    found = figures(report.page)
    assert dict(zip(found["throughput"]["data"][0]["x"], found["throughput"]["data"][0]["y"], strict=True)) == speeds
    expected = [speeds[n] / speeds[1] / n for n in repeats]
    assert found["efficiency"]["data"][0]["y"] == pytest.approx(expected)
    ideal = next(trace for trace in found["throughput"]["data"] if trace["name"] == "ideal")
    assert ideal["y"] == pytest.approx([speeds[1] * n for n in repeats])
    table = rows(report.page, "settings-title")
    assert [row[3].split()[0] for row in table] == [f"{speed:,.0f}" for speed in speeds.values()]
    assert [row[5].split()[0] for row in table] == [f"{100 * each:.1f}%" for each in expected]
    assert [row[2] for row in table] == ["3 (30)", "3 (30)", "3 (30)", "1 (10)"]


def test_parts_of_a_step_are_those_of_the_run_folders(study: StudyFolder, report: StudyReport) -> None:
    seconds, waited = 0.0, 0.0
    for run in study.points.glob("n4-*"):
        for event in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            if event["event"] == "step" and event["step"] > 10:
                seconds, waited = seconds + event["seconds"], waited + event["communication_seconds"]
    bars = {trace["name"]: trace for trace in figures(report.page)["parts"]["data"]}
    assert bars["communication"]["x"] == ["1", "2", "4", "8"]
    assert bars["communication"]["y"][2] == pytest.approx(waited / seconds)
    for place in range(4):
        assert sum(trace["y"][place] for trace in bars.values()) == pytest.approx(1)


def test_every_point_is_in_the_table_with_its_state_and_its_reason(study: StudyFolder, report: StudyReport) -> None:
    table = {row[0]: row for row in rows(report.page, "points-title")}
    assert len(table) == 12
    assert table["n8-r1"][1] == "finished"
    assert table["n8-r2"][1] == "failed"
    assert table["n8-r2"][-1] == "rank 3: out of <memory>; 2 attempts"
    assert table["n8-r3"][1] == "waiting"
    links = re.findall(r'<a href="(points/[^"]+)"', report.page.read_text())
    assert len(links) == 11  # the one that waits has no folder yet
    assert all((study.path / link / "record.json").exists() for link in links)


def test_points_are_also_a_file_of_plain_numbers(study: StudyFolder, report: StudyReport) -> None:
    with open(report.points, newline="") as file:
        lines = {line["id"]: line for line in csv.DictReader(file)}
    assert len(lines) == 12
    assert float(lines["n2-r3"]["samples_per_second"]) == speed_of(study.points / "n2-r3")
    assert lines["n8-r2"]["reason"] == "rank 3: out of <memory>"
    assert lines["n8-r3"]["samples_per_second"] == ""


def test_pictures_for_papers_are_drawn(report: StudyReport) -> None:
    names = {path.name for path in report.pictures.iterdir()}
    for chart in ("throughput", "efficiency", "parts", "communication", "losses", "losses_time"):
        assert {f"{chart}.png", f"{chart}.svg"} <= names
    assert (report.pictures / "parts.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_says_under_which_conditions_it_was_measured(report: StudyReport) -> None:
    text = report.page.read_text()
    for fact in (
        "a &lt;fast&gt; one",
        "2.13.0+cpu",
        "0123abc",
        "tutti scale digits --ranks 1,2,4,8",
        "tutti train -n 1",
    ):
        assert fact in text
    assert "out of <memory>" not in text


def test_the_page_asks_for_nothing_outside_itself(report: StudyReport) -> None:
    text = report.page.read_text()
    ours = text.partition("<script>")[0] + text.rpartition("<script>")[2]  # without plotly.js
    assert not re.search(r'(src|href)="(?!points/|data:)', ours)
    assert "https:" not in ours
    assert text.count("plotly.js v") == 1


def test_conclusions_come_first_and_are_printed(report: StudyReport) -> None:
    text = html.unescape(report.page.read_text())
    places = [text.index(sentence) for sentence in report.conclusions]
    assert len(places) > 4
    assert places == sorted(places)
    assert places[-1] < text.index("Throughput</h3>")


def test_losses_lie_along_steps_or_along_time(report: StudyReport) -> None:
    losses = figures(report.page)["losses"]
    steps, times = (axis["x"] for axis in losses["x_axes"])
    assert len(steps) == len(times) == len(losses["data"]) == 11
    assert steps[0] == losses["data"][0]["x"] == list(range(5, 61, 5))
    assert times[0] == sorted(times[0])


@pytest.mark.usefixtures("_no_pictures")
def test_two_studies_are_compared_on_one_page_elsewhere(study: StudyFolder, tmp_path: Path) -> None:
    def twice(point: Point) -> Made:
        exposed = 0.01 * 2 * (point.ranks - 1) / point.ranks
        return Made(64 * point.ranks / (0.1 + exposed), exposed / (0.1 + exposed), per_rank_batch=64)

    other = scale_study(tmp_path / "other", twice)
    found = write_report(study.path, other.path, tmp_path / "both.html")
    assert any(
        each.startswith("From 32 to 64 samples per rank efficiency at 8 ranks rises") for each in found.conclusions
    )
    names = [trace["name"] for trace in figures(found.page)["efficiency"]["data"]]
    assert names == ["32 per rank", "64 per rank", "80%"]
    assert len(rows(found.page, "points-title")) == 12
    assert {path.name for path in tmp_path.iterdir()} == {"other", "both.html", "both_figures", "both_points.csv"}
    links = re.findall(r'<a href="([^"]*points/[^"]+)"', found.page.read_text())
    assert len(links) == 11 + 4
    assert all((tmp_path / link / "record.json").exists() for link in links)


def on_nodes(folder: Path, *ranks: int) -> Path:
    """A study with two ranks on a node."""
    return spread(scale_study(folder, some, ranks=ranks), per_node=2)


@pytest.mark.usefixtures("_no_pictures")
def test_a_study_of_several_nodes_shows_its_forecast(tmp_path: Path) -> None:
    found = write_report(on_nodes(tmp_path / "s", 1, 2, 4, 8))
    table = rows(found.page, "forecast-title")
    assert [row[:2] for row in table] == [["16", "8"], ["32", "16"], ["64", "32"], ["128", "64"]]
    assert re.fullmatch(r"\d+% \(\d+% to \d+%\)", table[0][3])
    traces = {trace["name"]: trace for trace in figures(found.page)["forecast"]["data"]}
    assert traces["measured"]["x"] == [1, 2, 4, 8]
    assert traces["forecast"]["x"] == [16, 32, 64, 128]
    assert traces["forecast"]["marker"]["symbol"].endswith("-open")
    assert f"{100 * traces['forecast']['y'][0]:.0f}%" == table[0][3].split()[0]
    assert max(traces["90% interval"]["x"]) == 128
    assert [each for each in found.conclusions if each.startswith("Forecast of efficiency from measurements on 1, 2")]


@pytest.mark.usefixtures("_no_pictures")
def test_a_study_of_one_node_says_why_it_has_no_forecast(tmp_path: Path) -> None:
    found = write_report(scale_study(tmp_path / "s", some, ranks=(1, 2)).path)
    text = found.page.read_text()
    assert "There is no forecast for more ranks. Everything was measured on one node (up to 2 ranks)" in text
    assert "forecast" not in figures(found.page)
    assert not [each for each in found.conclusions if "orecast" in each]


@pytest.mark.usefixtures("_no_pictures")
def test_runs_that_were_forecast_are_shown_beside_the_forecast(tmp_path: Path) -> None:
    first = read_measured(on_nodes(tmp_path / "studies" / "first", 1, 2, 4))
    made = forecast(fit_curve(first.curve(), first.fabric), [8])
    digest = keep(first.path, first.curve(), first.fabric, None, made, first.workload).stem
    found = write_report(on_nodes(tmp_path / "studies" / "later", 8))
    text = html.unescape(found.page.read_text())
    assert [each for each in found.conclusions if each.startswith("These runs check earlier forecasts. 1 forecast")]
    row = next(row for row in rows(found.page, "forecast-title") if row[1] == digest)
    assert row[2:4] == ["8", "4"]
    assert row[-3:] == ["yes", "yes", "from measurements on 1, 2 nodes, TCP"]
    assert "Over all studies of this project: 1 forecast checked" in text
    assert f'<a href="../first/forecasts/{digest}.json">{digest}</a>' in text


@pytest.mark.usefixtures("_no_pictures")
def test_the_network_can_be_given(tmp_path: Path) -> None:
    path = on_nodes(tmp_path / "s", 1, 2, 4, 8)
    said = ["\n".join(write_report(path, fabric=fabric).conclusions) for fabric in (None, Fabric.HPC)]
    assert "on 1, 2, 4 nodes, TCP" in said[0]
    assert "on 1, 2, 4 nodes, HPC fabric" in said[1]


def learned(point: Point) -> Made:
    """Collapses, or has lost much, at the largest batch, by its rule."""
    batch, rule = point.values["batch.global"], point.values["schedule.scaling"]
    if (batch, rule) == (4096, "linear"):
        return Made(state=PointState("failed", "it diverged at step 3"), cause=Cause.DIVERGED, windows=2)
    last = 0.98 - 0.01 * point.repeat - (0.2 if rule == "none" and batch == 4096 else 0.0)
    return Made(epochs=[{"train_loss": 1.0, "valid_accuracy": 0.5}, {"train_loss": 0.5, "valid_accuracy": last}])


@pytest.mark.usefixtures("_no_pictures")
def test_a_sweep_shows_accuracy_against_the_batch_by_rule(tmp_path: Path) -> None:
    axes = {"batch.global": [64, 4096], "schedule.scaling": ["none", "linear"], "schedule.warmup_epochs": [0, 2]}
    goal = Goal("full", metric="valid_accuracy", target=0.9)
    found = write_report(sweep_study(tmp_path / "sweep", learned, axes, 2, goal).path)
    traces = {trace["name"]: trace for trace in figures(found.page)["metric"]["data"]}
    curve = traces["no scaling without warm-up"]
    assert curve["x"] == [64, 4096]
    assert curve["y"] == pytest.approx([0.965, 0.765])
    assert curve["error_y"]["array"] == pytest.approx([0.005, 0.005])
    assert traces["linear scaling with 2 epochs of warm-up"]["x"] == [64]
    broken = traces["collapsed, linear scaling without warm-up"]
    assert (broken["x"], broken["y"]) == ([4096, 4096], [0, 0])
    assert "the loss is not finite" in broken["text"][0]
    assert {"solution", "steps", "losses"} <= set(figures(found.page))


def large_batches(path: Path) -> StudyFolder:
    """Two optimizers, three rules and two warm-ups along three batches, as a lesson on large batches has them."""
    optim = [{"name": "sgd", "lr": 0.01}, {"name": "lars", "lr": 0.01, "eta": 0.02}]
    rules = ["none", "linear", "sqrt"]
    axes = {
        "optim": optim,
        "schedule.scaling": rules,
        "schedule.warmup_epochs": [0, 2],
        "batch.global": [64, 256, 4096],
    }
    return sweep_study(path, learned, axes, 2)


@pytest.mark.usefixtures("_no_pictures")
def test_many_curves_are_shown_in_panels_with_the_rules_in_each(tmp_path: Path) -> None:
    page = write_report(large_batches(tmp_path / "s").path).page
    metric = figures(page)["metric"]
    assert metric["panels"] == [
        f"{o} {w}" for o in ("sgd", "lars") for w in ("without warm-up", "with 2 epochs of warm-up")
    ]
    assert [t["name"] for t in metric["data"] if t["showlegend"]] == ["no scaling", "linear scaling", "sqrt scaling"]
    assert {t["xaxis"] for t in metric["data"]} == {"x", "x2", "x3", "x4"}
    assert all(metric["layout"][f"yaxis{number}"]["matches"] == "y" for number in (2, 3, 4))
    assert metric["close_up"] == pytest.approx([0.75, 0.98], abs=0.02)
    text = html.unescape(page.read_text().partition("<script>")[0])
    assert "'name'" not in text and "{name" not in text
    assert {row[0] for row in rows(page, "settings-title")} == {"sgd", "lars"}


@pytest.mark.usefixtures("_no_pictures")
def test_of_many_runs_the_losses_of_one_of_each_setting_are_drawn(tmp_path: Path) -> None:
    page = write_report(large_batches(tmp_path / "s").path).page
    assert len(figures(page)["losses"]["data"]) == 36  # of 72
    assert "one line for the first run of each setting" in page.read_text()


def test_a_value_that_is_a_part_is_json_in_the_csv(tmp_path: Path) -> None:
    optim = [{"name": "sgd", "lr": 0.01}, {"name": "lars", "lr": 0.01, "eta": 0.02}]
    analysis = read_study(sweep_study(tmp_path / "s", lambda _: None, {"optim": optim}, 1).path)
    lines = list(csv.DictReader(points_csv(analysis).splitlines()))
    assert [json.loads(line["optim"]) for line in lines] == optim


def test_a_logarithmic_axis_has_ticks_among_its_values_or_is_a_plain_one() -> None:
    assert log_axis("s", [6.41, 6.42, 6.45]) == ChartAxis("s")
    assert log_axis("s", [640.0, 1035.0, 3494.0]).ticks == (500, 1000, 2000)
    assert log_axis("s", [0.5, 3e4]).ticks == (1, 10, 100, 1000, 10000)


def test_panels_are_drawn_for_papers(tmp_path: Path) -> None:
    curves = [
        Curve("rule", [1, 2], [0.9, 0.1], group="rule", panel=panel, in_legend=not n) for n, panel in enumerate("abc")
    ]
    chart = Chart(
        "c", "Title", "", ChartAxis("batch"), ChartAxis("accuracy", percent=True), tuple(curves), close_up=(0.8, 1.0)
    )
    drawn = draw_charts([chart], tmp_path / "figures")
    assert [path.name for path in drawn] == ["c.png", "c.svg", "c_close.png", "c_close.svg"]
    words = drawn[1].read_text()
    assert all(f"<!-- {word} -->" in words for word in ("a", "b", "c", "Title", "batch"))


def test_a_study_of_which_nothing_has_run_gives_a_page_too(tmp_path: Path) -> None:
    found = write_report(scale_study(tmp_path / "s", lambda _: None).path)
    assert found.conclusions == ["4 of 4 points have not finished yet."]
    assert "There is no data for figures yet." in found.page.read_text()
    assert len(rows(found.page, "points-title")) == 4


@pytest.mark.usefixtures("_no_pictures")
def test_the_same_folder_gives_the_same_page(study: StudyFolder, report: StudyReport) -> None:
    before = report.page.read_bytes()
    assert write_report(study.path).page.read_bytes() == before


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("nowhere/report.html", "there is no folder nowhere. Create it first"),
        ("report.pdf", "expected the name of an HTML file, such as report.html"),
    ],
)
def test_a_place_that_cannot_be_is_refused_before_anything_is_written(
    study: StudyFolder, out: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FolderError, match=message):
        write_report(study.path, out=Path(out))
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_a_folder_without_a_study_is_refused(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("report", "runs")
    assert done.code == 2
    assert "error: runs holds no study" in done.err
    assert "expected a folder that tutti scale or tutti sweep has made" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_the_command_prints_conclusions_and_imports_no_torch(study: StudyFolder, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom tutti.cli.main import main\n"
        f"sys.argv = ['tutti', 'report', {str(study.path)!r}, '--out', 'page.html']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'tensorflow', 'pandas', 'scipy') if name in sys.modules])\n"
    )
    done = command(sys.executable, "-c", program, cwd=tmp_path)
    assert done.code == 0, done.all
    assert "Efficiency stays above 80%" in done.out
    assert "report:     page.html" in done.out
    assert done.out.splitlines()[-1] == "[]"
