"""Real scaling studies: the numbers of the report, computed independently from the run folders."""

from pathlib import Path

import pytest
from browser import needs_browser, open_browser
from conftest import command
from prepared import PYTHON
from study_figures import (
    Size,
    check_charts,
    check_csv,
    check_losses,
    check_points,
    check_table,
    look_at,
    read_sizes,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.xdist_group("studies")]
STEPS, WARMUP = 40, 8
BATCHES = {"weak": [64, 128, 256], "strong": [64, 64, 64]}


@pytest.fixture(scope="module", params=["weak", "strong"])
def study(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """`digits` on 1, 2 and 4 ranks, twice each."""
    folder = tmp_path_factory.mktemp(request.param)
    words = ["scale", "digits", "--ranks", "1,2,4", "--mode", request.param, "--repeat", "2"]
    words += ["--steps", str(STEPS), "--warmup", str(WARMUP)]
    done = command(PYTHON, "-m", "tutti", *words, cwd=folder)
    assert done.code == 0, done.all
    (page,) = folder.glob("runs/studies/*/*/report.html")
    return request.param, page.parent


@pytest.fixture
def sizes(study: tuple[str, Path]) -> list[Size]:
    return read_sizes(study[1], WARMUP)


def test_a_study_does_the_work_that_was_asked_for(study: tuple[str, Path], sizes: list[Size]) -> None:
    assert [(size.ranks, len(size.runs)) for size in sizes] == [(1, 2), (2, 2), (4, 2)]
    assert [size.runs[0].global_batch for size in sizes] == BATCHES[study[0]]
    for run in (run for size in sizes for run in size.runs):
        assert run.last_step == run.steps[-1] == STEPS + WARMUP
        assert WARMUP < run.steps[0] <= WARMUP + STEPS // 10  # ten windows, and more where epochs end in between


def test_the_csv_has_the_figures_of_the_run_folders(study: tuple[str, Path], sizes: list[Size]) -> None:
    check_csv(sizes, study[1] / "points.csv")


@needs_browser
def test_the_page_shows_the_figures_of_the_run_folders(
    study: tuple[str, Path], sizes: list[Size], tmp_path: Path
) -> None:
    with open_browser(tmp_path) as browser:
        shown = look_at(browser, study[1] / "report.html")
    check_table(sizes, shown)
    check_points(sizes, shown)
    check_charts(sizes, shown)
    check_losses(sizes, shown)
