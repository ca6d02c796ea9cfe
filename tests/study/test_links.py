"""Exposed communication of a scaling study compared with an all-reduce over measured links."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import Tutti
from study_folders import Made, scale_study, sweep_study

from tutti.bench.collectives.results import Measured, Results
from tutti.errors import ConfigError, FolderError
from tutti.report.study.write import read_study, write_report
from tutti.study.conclusions import conclude
from tutti.study.definition import Point

BYTES = 20_000_000
RATE = 25e6  # bytes a second of a link
NODES = ["n1", "n2", "n3", "n4"]


def all_reduce(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * BYTES / RATE


def measured(
    folder: Path,
    ranks: Sequence[int] = (2, 4),
    operation: str = "all_reduce",
    hosts: Sequence[str] = NODES,
    device: str = "cpu",
) -> Path:
    """A run folder of `tutti bench collectives`."""
    points = [
        Measured(operation, n, len(set(hosts[:n])), size, 1, (2 * (n - 1) / n * size / RATE,) * 3)
        for n in ranks
        for size in (1 << 18, 1 << 20, 1 << 25)
    ]
    folder.mkdir()
    Results({"hosts": list(hosts), "backend": "gloo", "device": device}, points, []).write(folder)
    return folder


def study(folder: Path, share: float, hosts: Sequence[str] = NODES, gradient_bytes: int | None = BYTES) -> Path:
    """A study in which this part of an all-reduce is exposed, and four seconds are computed in every step."""

    def made(point: Point) -> Made:
        exposed = share * all_reduce(point.ranks) if point.ranks > 1 else 0.0
        step = 4 + exposed
        return Made(32 * point.ranks / step, exposed / step, noise=0.001)

    made_up = scale_study(folder, made, ranks=(1, 2, 4), repeats=2)
    for path in made_up.points.glob("*/record.json"):
        record = json.loads(path.read_text())
        record["plan"] |= {"gradient_bytes": gradient_bytes} if gradient_bytes else {}
        record["segments"][0]["hosts"] = list(hosts[: record["ranks"]])
        path.write_text(json.dumps(record))
    return made_up.path


def said(study: Path, collectives: Path) -> str:
    return "\n".join(conclude(read_study(study, collectives)))


def test_exposed_communication_is_set_beside_an_all_reduce(tmp_path: Path) -> None:
    links = read_study(study(tmp_path / "s", 0.98), measured(tmp_path / "links")).links
    assert links is not None
    assert [each.ranks for each in links.comparisons] == [2, 4]
    assert [each.seconds for each in links.comparisons] == pytest.approx([0.8, 1.2], rel=1e-3)
    assert [each.ratio.value for each in links.comparisons] == pytest.approx([0.98, 0.98], rel=5e-3)
    assert all(each.ratio.low <= each.ratio.value <= each.ratio.high for each in links.comparisons)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.98, "; 1.18 s per step are exposed, 98% of it: almost nothing is hidden behind compute."),
        (0.40, "; 480 ms per step are exposed, 40% of it: the rest is hidden behind compute."),
        (1.70, "; 2.04 s per step are exposed, 1.70 times as long: links do not explain it."),
    ],
)
def test_the_conclusion_says_whether_the_links_explain_it(tmp_path: Path, share: float, words: str) -> None:
    told = said(study(tmp_path / "s", share), measured(tmp_path / "links"))
    assert f"An all-reduce of 19.1 MiB on 4 ranks takes 1.2 s by the measured links{words}" in told


def test_what_was_measured_on_fewer_ranks_is_told_as_such(tmp_path: Path) -> None:
    told = said(study(tmp_path / "s", 1.0), measured(tmp_path / "links", ranks=(2,)))
    assert "on 4 ranks takes 1.2 s by the links, measured on other numbers of ranks;" in told


def test_the_page_the_chart_and_the_points_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.report.study.write.draw_charts", lambda charts, folder: folder.mkdir(exist_ok=True))
    links = measured(tmp_path / "links")
    report = write_report(study(tmp_path / "s", 0.98), collectives=links / "collectives.json")
    page = report.page.read_text()
    assert "all-reduce by the links" in page
    assert "exposed / all-reduce" in page
    assert f"by the collectives of {links}/collectives.json" in page
    figures = json.loads(page.partition('<script id="figures" type="application/json">')[2].partition("</script>")[0])
    [chart] = [figure for figure in figures if figure["id"] == "communication"]
    [line] = [trace for trace in chart["data"] if trace["name"] == "all-reduce by the links"]
    assert line["x"] == [2, 4]
    assert line["y"] == pytest.approx([800, 1200], rel=1e-3)
    with open(report.points, newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert rows["n1-r1"]["all_reduce_seconds"] == ""
    assert float(rows["n4-r1"]["all_reduce_seconds"]) == pytest.approx(1.2, rel=1e-3)
    assert float(rows["n4-r1"]["exposed_seconds"]) == pytest.approx(0.98 * 1.2, rel=1e-2)
    assert rows["n4-r1"]["gradient_bytes"] == str(BYTES)


def refused(study: Path, collectives: Path) -> str:
    """The message with which a measurement is refused; nothing is written."""
    before = sorted(study.iterdir())
    with pytest.raises((ConfigError, FolderError)) as caught:
        write_report(study, collectives=collectives)
    assert sorted(study.iterdir()) == before
    return str(caught.value)


@pytest.mark.system
def test_the_command_refuses_it_in_a_line(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("report", str(study(tmp_path / "s", 1.0)), "--collectives", "nowhere")
    assert done.code == 2
    assert "error: --collectives nowhere: nowhere is not a measurement of collectives ([Errno 2]" in done.err


def test_a_folder_without_collectives_is_refused(tmp_path: Path) -> None:
    path = study(tmp_path / "s", 1.0)
    assert "expected a run folder of `tutti bench collectives`" in refused(path, tmp_path)
    (tmp_path / "collectives.json").write_text("{}")
    assert "is not a measurement of collectives (expected a JSON object with a list 'models')" in refused(
        path, tmp_path
    )


def test_a_measurement_without_an_all_reduce_is_refused(tmp_path: Path) -> None:
    told = refused(study(tmp_path / "s", 1.0), measured(tmp_path / "links", operation="all_gather"))
    assert "has a model of all_gather, and none of all_reduce. Run `tutti bench collectives" in told


def test_a_sweep_has_no_ranks_to_compare(tmp_path: Path) -> None:
    path = sweep_study(tmp_path / "s", lambda _: Made(), {"batch.global": [64, 128]}).path
    assert "is a sweep, on one number of ranks: expected a scaling study" in refused(path, measured(tmp_path / "links"))


def test_links_of_one_host_say_nothing_of_several(tmp_path: Path) -> None:
    told = refused(study(tmp_path / "s", 1.0), measured(tmp_path / "links", hosts=["n1"] * 4))
    assert "On 2 ranks: collectives were measured on ranks of one host, and these are on 2." in told
    assert "where the ranks of the study were; on 4 ranks:" in told


def test_links_of_a_gpu_say_nothing_of_cpus(tmp_path: Path) -> None:
    told = refused(study(tmp_path / "s", 1.0), measured(tmp_path / "links", device="NVIDIA H200"))
    assert "measured on NVIDIA H200, and the study ran on another device" in told


def test_runs_that_do_not_know_their_gradients_are_refused(tmp_path: Path) -> None:
    told = refused(study(tmp_path / "s", 1.0, gradient_bytes=None), measured(tmp_path / "links"))
    assert "the record does not contain the size of the gradients. Run the study again" in told


def test_nothing_is_said_of_gradients_that_pass_through_memory(tmp_path: Path) -> None:
    one = ["n1"] * 4
    told = refused(study(tmp_path / "s", 1.0, one, 100_000), measured(tmp_path / "links", hosts=one))
    assert "are averaged in shared memory" in told
