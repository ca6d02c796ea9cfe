"""Runs have short names, and are found by whatever a person may call them."""

from pathlib import Path

import pytest
from run_folders import make_run

from tutti.errors import FolderError
from tutti.runs.listing import find_run, list_folders, name_runs


@pytest.fixture
def out(tmp_path: Path) -> Path:
    out = tmp_path / "runs"
    make_run(out / "digits" / "2026-11-15_101500_n2")
    make_run(out / "digits" / "mlp" / "2026-11-15_101500_n4", recipe="digits/mlp")
    study = out / "studies" / "digits" / "2026-11-15_120000_scale_weak"
    for point in ("n1-r1", "n2-r1"):
        make_run(study / "points" / point)
    (study / "study.json").write_text("{}")
    return out


def test_a_name_tells_recipe_start_and_ranks_or_study_and_point(out: Path) -> None:
    assert set(name_runs(list_folders(out))) == {
        "digits_2026-11-15_101500_n2",
        "digits/mlp_2026-11-15_101500_n4",
        "digits_2026-11-15_120000_scale_weak/n1-r1",
        "digits_2026-11-15_120000_scale_weak/n2-r1",
    }


def test_names_are_different_and_stay_below_their_folder(tmp_path: Path) -> None:
    for place in ("a", "b"):
        make_run(tmp_path / place / "same", recipe="../digits")
    assert list(name_runs(list_folders(tmp_path))) == ["digits_same", "digits_same-2"]


@pytest.mark.parametrize(
    "given",
    [
        "{out}/digits/2026-11-15_101500_n2",
        "{out}/digits/2026-11-15_101500_n2/config.yaml",
        "digits/2026-11-15_101500_n2",
        "2026-11-15_101500_n2",
        "digits_2026-11-15_101500_n2",
    ],
)
def test_a_run_is_found_by_its_folder_or_its_name(given: str, out: Path) -> None:
    assert find_run(given.format(out=out), out).path == out / "digits" / "2026-11-15_101500_n2"


def test_what_is_no_run_is_refused_with_what_is_there(out: Path) -> None:
    make_run(out / "studies" / "digits" / "other" / "points" / "n1-r1")
    (out / "empty").mkdir()
    for given, words in (
        ("n1-r1", ["'n1-r1' may be any of ", "scale_weak/points/n1-r1, ", "give the folder of the one that is meant"]),
        (
            "2026-11-15_101500_n3",
            ["there is no run '2026-11-15_101500_n3', here or in ", "Did you mean '2026-11-15_1015"],
        ),
        (str(out / "digits"), ["digits holds 2 runs and is none itself: expected a run folder, as `tutti runs` lists"]),
        (str(out / "empty"), ["empty is no run that has begun to train: expected a run folder"]),
    ):
        with pytest.raises(FolderError) as refused:
            find_run(given, out)
        for word in words:
            assert word in str(refused.value)
