"""Damaged files of studies are read, or give an error that names them."""

import dataclasses
import json
from pathlib import Path

import pytest
from damage import changed, damaged, damaged_json, many, read_or_refuse
from hypothesis import given
from hypothesis import strategies as st
from study_folders import FINISHED, GOAL, Made, write_study

from tutti.config.schema import LARGEST_SEED
from tutti.errors import ConfigError, FolderError
from tutti.study.definition import Definition, Point, PointState, StudyFolder, read_definition, read_state
from tutti.study.outcome import read_figures, read_outcomes
from tutti.study.scale import scale_points
from tutti.study.sweep import SweepAxis, SweepGrid, sweep_points

POINTS = tuple(Point(f"n{ranks}-r1", ranks, ("batch.per_rank=32",), {"ranks": ranks}, 1, 42) for ranks in (1, 2))
STUDY = Definition(
    "scale", "digits", ("epochs=2",), GOAL, POINTS, "weak", created="2026-11-15", versions={"torch": "2"}
)
STATE = {"state": "finished", "reason": None, "attempts": 1, "started": "now", "ended": None, "job": "7"}
EPOCHS = ({"train_loss": 1.0, "valid_loss": 1.1, "valid_accuracy": 0.6},) * 2


@pytest.fixture
def study(tmp_path: Path) -> StudyFolder:
    return write_study(tmp_path / "study", STUDY, lambda _: Made(epochs=EPOCHS))


@many(200)
@given(content=damaged_json(json.loads(json.dumps(dataclasses.asdict(STUDY)))))
def test_a_damaged_definition_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    folder = StudyFolder(tmp_path)
    folder.definition.write_bytes(content)
    found = read_or_refuse(lambda: read_definition(folder), tmp_path)
    if found is not None:
        assert all(folder.run(point.id).path.parent == folder.points for point in found.points)


@pytest.mark.parametrize("name", ["../..", "/", "", ".", "..", "a/b", "\0"])
def test_a_point_that_would_be_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    plain = json.loads(json.dumps(dataclasses.asdict(STUDY)))
    plain["points"][0]["id"] = name
    (tmp_path / "study.json").write_text(json.dumps(plain))
    with pytest.raises(FolderError, match="of a point is not a valid name of a folder"):
        read_definition(StudyFolder(tmp_path))


@many(100)
@given(content=damaged_json(STATE))
def test_a_damaged_state_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    folder = StudyFolder(tmp_path)
    path = folder.state("n1-r1")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    found = read_or_refuse(lambda: read_state(folder, "n1-r1"), path)
    assert found is None or isinstance(found, PointState)
    path.unlink()
    assert read_state(folder, "n1-r1") == PointState()


@many(60)
@given(data=st.data())
def test_damaged_metrics_of_a_point_are_read_or_refused(study: StudyFolder, data: st.DataObject) -> None:
    run = study.run("n2-r1")
    whole = run.path / "whole"
    if not whole.exists():
        whole.write_bytes(run.metrics.read_bytes())
    lines = whole.read_bytes().splitlines(keepends=True)
    if data.draw(st.booleans()):
        run.metrics.write_bytes(data.draw(damaged(whole.read_bytes())))
    else:
        place = data.draw(st.integers(0, len(lines) - 1))
        lines[place] = json.dumps(data.draw(changed(json.loads(lines[place])))).encode() + b"\n"
        run.metrics.write_bytes(b"".join(lines))
    outcomes = read_or_refuse(lambda: read_outcomes(study, STUDY), run.metrics)
    assert outcomes is None or outcomes[0].windows


def test_random_bytes_after_the_metrics_change_no_figure(study: StudyFolder) -> None:
    before = [read_figures(each, GOAL) for each in read_outcomes(study, STUDY)]
    for point in POINTS:
        with open(study.run(point.id).metrics, "ab") as file:
            file.write(b'\xff\xfe\x00{"event": "st')
    after = [read_figures(each, GOAL) for each in read_outcomes(study, STUDY)]
    assert after == before and after[0].outcome.state == FINISHED


def test_a_study_whose_seeds_are_out_of_range_is_refused() -> None:
    last = f"seed={LARGEST_SEED}"
    said = f"seed={LARGEST_SEED + 1} .*expected a whole number from 0 to {LARGEST_SEED}"
    with pytest.raises(ConfigError, match=said):
        sweep_points(
            "digits", [last], SweepGrid((SweepAxis("epochs", ("1", "2")),), seeds=2), GOAL, skip_impossible=False
        )
    full = type(GOAL)("full")
    with pytest.raises(ConfigError, match=said):
        scale_points("digits", [last], [1], "weak", full, repeats=2)
    assert len(scale_points("digits", [last], [1], "weak", full, repeats=1)) == 1
