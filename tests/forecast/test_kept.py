"""Forecasts that are kept, and checked when the runs exist."""

from dataclasses import replace
from pathlib import Path

import pytest
from scaling_curves import ring, weak_curve

from tutti.errors import FolderError
from tutti.forecast.forecast import fit_curve, forecast
from tutti.forecast.kept import FOLDER, check_forecasts, keep, read_kept, summarise_checks
from tutti.forecast.population import Fabric

CURVE = weak_curve(ring(0.1), (1, 2))


def kept_in(folder: Path, *ranks: int) -> Path:
    return keep(folder, CURVE, Fabric.HPC, None, forecast(fit_curve(CURVE, Fabric.HPC), ranks))


def test_a_forecast_is_kept_once_with_its_first_date(tmp_path: Path) -> None:
    path = kept_in(tmp_path, 16, 32)
    first = path.read_text()
    assert kept_in(tmp_path, 16, 32) == path
    assert path.read_text() == first
    assert kept_in(tmp_path, 64) != path
    assert len(read_kept(tmp_path)) == 2


def test_what_is_kept_is_what_was_made(tmp_path: Path) -> None:
    made = forecast(fit_curve(CURVE, Fabric.HPC), [16])
    keep(tmp_path, CURVE, Fabric.HPC, "200Gbit,3us", made)
    kept = read_kept(tmp_path)[0]
    assert kept.forecasts == tuple(made)
    assert kept.measured == CURVE.measurements
    assert (kept.fabric, kept.link, kept.mode) == ("hpc", "200Gbit,3us", "weak")


def test_forecasts_are_checked_by_runs_that_were_not_known_then(tmp_path: Path) -> None:
    kept_in(tmp_path, 8, 16, 32)
    later = weak_curve(ring(0.1), (1, 2, 4)).measurements
    checked = check_forecasts(read_kept(tmp_path), later)
    assert [each.ranks for each in checked] == [16]
    assert abs(checked[0].error) < 0.05
    assert checked[0].is_inside(checked[0].interval90)
    slow = [replace(run, samples_per_second=run.samples_per_second / 3) for run in later]
    missed = check_forecasts(read_kept(tmp_path), slow)[0]
    assert missed.error > 1.5
    assert not missed.is_inside(missed.interval90)
    record = summarise_checks([*checked, missed])
    assert record is not None
    assert (record.points, record.inside90) == (2, 1)
    assert record.worst_error == missed.error


def test_runs_on_other_numbers_of_nodes_check_nothing(tmp_path: Path) -> None:
    kept_in(tmp_path, 16)
    elsewhere = [replace(run, nodes=2 * run.nodes) for run in weak_curve(ring(0.1), (4,)).measurements]
    assert check_forecasts(read_kept(tmp_path), elsewhere) == []
    assert summarise_checks([]) is None


def test_a_damaged_forecast_is_refused(tmp_path: Path) -> None:
    assert read_kept(tmp_path) == []
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "x.json").write_text("{")
    with pytest.raises(FolderError, match=r"x.json is damaged.*Remove it"):
        read_kept(tmp_path)
