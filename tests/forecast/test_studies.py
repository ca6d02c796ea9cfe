"""The measurements of a study of ranks."""

import dataclasses
from pathlib import Path

import pytest
from study_folders import Made, scale_study, spread, sweep_study

from tutti.errors import TuttiError
from tutti.forecast.forecast import fit_curve, forecast
from tutti.forecast.kept import FOLDER, keep
from tutti.forecast.population import Fabric
from tutti.forecast.studies import MeasuredStudy, check_project, forecast_study, read_study
from tutti.study.definition import Point, PointState, read_definition, write_definition


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


def scaled(folder: Path, *ranks: int, per_node: int = 2, slower: float = 1.0) -> MeasuredStudy:
    """A study that loses a tenth of its speed between nodes."""

    def run(point: Point) -> Made:
        return Made(100.0 * point.ranks * (0.9 if point.ranks > per_node else 1.0) / slower)

    return read_study(spread(scale_study(folder, run, ranks=ranks), per_node))


def test_a_study_on_several_nodes_has_a_forecast(tmp_path: Path) -> None:
    found = forecast_study(scaled(tmp_path / "s", 2, 4, 8), 0.8, 60)
    assert found.reason == ""
    assert [(each.ranks, each.nodes) for each in found.made] == [(16, 8), (32, 16), (64, 32), (128, 64)]
    assert found.sentences[0].startswith("Forecast of efficiency from measurements on 1, 2, 4 nodes, TCP, with 90%")


def test_a_strong_study_is_continued_as_far_as_its_batch_splits(tmp_path: Path) -> None:
    def run(point: Point) -> Made:
        return Made(100.0 * point.ranks * (0.9 if point.ranks > 2 else 1.0), per_rank_batch=32 // point.ranks)

    study = read_study(spread(scale_study(tmp_path / "s", run, ranks=(2, 4, 8), mode="strong"), 2))
    assert [each.ranks for each in forecast_study(study, 0.8, 60).made] == [16, 32]
    study = read_study(spread(scale_study(tmp_path / "t", run, ranks=(2, 4, 32), mode="strong"), 2))
    assert "does not split over twice the measured ranks" in forecast_study(study, 0.8, 60).reason


def test_a_study_on_one_node_says_what_to_measure(tmp_path: Path) -> None:
    found = forecast_study(scaled(tmp_path / "s", 1, 2, 4, per_node=4), 0.8, 60)
    assert (found.made, found.sentences, found.curve) == ((), (), None)
    assert "on one node (up to 4 ranks), which does not show the link" in found.reason
    assert "Measure 3 or 4 nodes, with 4 ranks on each" in found.reason


def test_a_study_that_contradicts_itself_has_no_forecast_but_the_reason(tmp_path: Path) -> None:
    def run(point: Point) -> Made:
        return Made(100.0 * point.ranks**1.5)

    found = forecast_study(read_study(spread(scale_study(tmp_path / "s", run), 2)), 0.8, 60)
    assert found.made == ()
    assert "has an efficiency of" in found.reason


@pytest.mark.parametrize(
    ("device", "on", "fabric"),
    [
        ("cpu", "perlmutter", Fabric.TCP),
        ("NVIDIA A100", "perlmutter", Fabric.HPC),
        ("NVIDIA A100", "slurm", None),
        ("NVIDIA A100", "nowhere", None),
        ("NVIDIA A100", None, None),
    ],
)
def test_the_fabric_is_that_of_the_backend_or_of_the_site(
    tmp_path: Path, device: str, on: str | None, fabric: Fabric | None
) -> None:
    folder = scale_study(tmp_path / "s", made, ranks=(1, 2))
    write_definition(folder, dataclasses.replace(read_definition(folder), on=on))
    assert read_study(spread(folder, 1, device=device)).fabric is fabric


def kept(study: MeasuredStudy, *ranks: int) -> Path:
    curve = study.curve()
    return keep(study.path, curve, Fabric.TCP, None, forecast(fit_curve(curve, Fabric.TCP), ranks), study.workload)


def test_runs_check_the_forecasts_of_all_studies_of_the_project(tmp_path: Path) -> None:
    first = scaled(tmp_path / "studies" / "digits" / "first", 2, 4)
    assert check_project(first).record is None
    kept(first, 8, 16)
    assert check_project(first).checked == ()
    second = scaled(tmp_path / "studies" / "digits" / "second", 8)
    third = scaled(tmp_path / "studies" / "other" / "third", 16, slower=9.0)
    found = check_project(second)
    assert [(each.ranks, each.measured_in) for each in found.checked] == [(8, str(second.path))]
    assert found.checked[0].is_inside(found.checked[0].interval90)
    assert found.record is not None
    assert (found.record.points, found.record.inside90) == (2, 1)
    assert found.record.sentence().startswith("2 forecasts checked: off by ")
    assert [each.ranks for each in check_project(third).checked] == [16]


def test_studies_in_any_folder_are_checked_with_those_beside_them(tmp_path: Path) -> None:
    kept(scaled(tmp_path / "first", 2, 4), 8)
    scaled(tmp_path / "deep" / "elsewhere", 2, 4)
    assert len(check_project(scaled(tmp_path / "second", 8)).checked) == 1
    damaged = tmp_path / "first" / FOLDER / "x.json"
    damaged.write_text("{")
    found = check_project(scaled(tmp_path / "third", 8))
    assert found.checked == ()
    assert "x.json is damaged" in found.notes[0]


def test_a_forecast_that_was_made_after_its_run_is_shown_and_not_counted(tmp_path: Path) -> None:
    first = scaled(tmp_path / "first", 2, 4)
    kept(first, 8, 16)
    early = spread(scale_study(tmp_path / "early", made, ranks=(8,)), 2, started="2026-01-01T00:00:00+00:00")
    found = check_project(read_study(early))
    assert [each.is_ahead for each in found.checked] == [False]
    assert found.record is None
    both = check_project(scaled(tmp_path / "later", 16))
    assert both.record is not None
    assert (both.record.points, both.record.not_ahead) == (1, 1)
    assert both.record.sentence().endswith("1 more was made after its run had begun, and not counted.")
