"""The measurements of a study of ranks."""

import json
from pathlib import Path

import pytest
from study_folders import Made, scale_study, sweep_study

from tutti.errors import TuttiError
from tutti.forecast.studies import read_study
from tutti.study.definition import Point, PointState, StudyFolder


def spread(folder: StudyFolder, per_node: int) -> Path:
    """Place the ranks of every run on nodes of so many ranks."""
    for record in folder.points.glob("*/record.json"):
        content = json.loads(record.read_text())
        ranks = content["ranks"]
        content["segments"][0]["hosts"] = [f"n{rank // per_node}" for rank in range(ranks)]
        record.write_text(json.dumps(content))
    return folder.path


def made(point: Point) -> Made:
    return Made(100.0 * point.ranks * 0.95 ** (point.ranks > 2), communication=0.05 * (point.ranks > 2))


def test_a_study_gives_one_measurement_for_each_number_of_ranks(tmp_path: Path) -> None:
    path = spread(scale_study(tmp_path / "study", made, repeats=3), 2)
    found = read_study(path)
    curve, size = found.curve(), found.gradient_bytes
    assert [(run.ranks, run.nodes) for run in curve.measurements] == [(1, 1), (2, 1), (4, 2), (8, 4)]
    assert [run.samples_per_second for run in curve.measurements] == pytest.approx([100, 200, 380, 760])
    last = curve.measurements[-1]
    assert last.per_rank_batch == 32
    assert last.exposed_seconds == pytest.approx(0.05 * 32 * 8 / 760, rel=0.01)
    assert (curve.mode, curve.ranks_per_node, size) == ("weak", 2, None)


def test_a_study_without_a_finished_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    failed = PointState("failed", reason="out of memory", attempts=1)
    path = scale_study(tmp_path / "failed", lambda point: Made(state=failed)).path
    with pytest.raises(TuttiError, match=r"4 of 4 points failed \(n1-r1: out of memory\)"):
        read_study(path)
    path = scale_study(tmp_path / "waiting", lambda point: None).path
    with pytest.raises(TuttiError, match=r"no finished run: 4 points have not run.*--resume"):
        read_study(path)
    path = scale_study(tmp_path / "empty", lambda point: None, ranks=()).path
    with pytest.raises(TuttiError, match="it has no points"):
        read_study(path)


def test_a_sweep_is_no_study_of_ranks(tmp_path: Path) -> None:
    path = sweep_study(tmp_path / "sweep", lambda point: None, {"optim.lr": [0.1]}).path
    with pytest.raises(TuttiError, match="study of tutti sweep: expected one of tutti scale"):
        read_study(path)


def test_a_folder_that_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TuttiError, match="holds no study"):
        read_study(tmp_path)
