"""`tutti scale` and `tutti sweep` on real ranks: killed and resumed, and with points that fail."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser, open_browser
from conftest import Finished, Tutti, command, environment
from prepared import PYTHON
from study_figures import (
    check_charts,
    check_csv,
    check_losses,
    check_points,
    check_table,
    figures_in,
    lines_in,
    look_at,
    read_sizes,
    rows_in,
)
from waiting import wait_until

from tutti.config.load import resolve
from tutti.runs.step_parts import SHARES
from tutti.study.definition import StudyFolder, read_definition, read_state
from tutti.study.outcome import read_outcomes

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("studies")]

SCALE = ["scale", "digits/mlp", "--ranks", "1,2", "--mode", "weak", "--steps", "6", "--warmup", "2"]
PROBE = """
import sys
from tutti.cli.main import main
sys.argv = ["tutti", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    print(end.code, [name for name in ("torch", "sklearn", "matplotlib", "plotly") if name in sys.modules])
"""


def study_in(place: Path) -> StudyFolder:
    (path,) = place.glob("runs/studies/digits/mlp/*/study.json")
    return StudyFolder(path.parent)


def kill_at(path: str, place: Path, *words: str) -> StudyFolder:
    """Start or resume a study, and kill it and its process group when a file is there."""
    process = subprocess.Popen(
        [PYTHON, "-m", "tutti", *words],
        cwd=place,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: list(place.glob(f"runs/studies/*/*/*/{path}")), lambda: f"no {path}", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return study_in(place)


def run(place: Path, *words: str) -> Finished:
    done = command(PYTHON, "-m", "tutti", *words, cwd=place)
    assert done.code == 0, done.all
    return done


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyFolder, Finished]:
    """A study of ranks that was killed in its second point, and went on."""
    place = tmp_path_factory.mktemp("killed")
    folder = kill_at("states/n2-r1.json", place, *SCALE)
    assert [read_state(folder, name).state for name in ("n1-r1", "n2-r1")] == ["finished", "running"]
    measured = folder.run("n1-r1").metrics.read_bytes()
    done = run(place, "scale", "--resume", str(folder.path))
    assert folder.run("n1-r1").metrics.read_bytes() == measured
    return folder, done


def test_a_killed_study_of_ranks_goes_on_and_gives_all_its_points(resumed: tuple[StudyFolder, Finished]) -> None:
    folder, done = resumed
    one, two = read_outcomes(folder, read_definition(folder))
    assert (one.is_finished, two.is_finished, two.state.attempts) == (True, True, 2)
    assert [each.plan["global_batch"] for each in (one, two)] == [64, 128]
    assert [window.step for window in two.windows] == [3, 4, 5, 6, 7, 8]
    assert all(set(window.shares) == set(SHARES) for window in two.windows)
    assert f"report: {folder.report}" in done.out and folder.report.is_file()
    _check_table(done, [_speed(one), _speed(two)])


def test_its_csv_has_the_figures_of_the_run_folders(resumed: tuple[StudyFolder, Finished]) -> None:
    check_csv(read_sizes(resumed[0].path, warmup_steps=2), resumed[0].path / "points.csv")


@needs_browser
def test_its_page_shows_the_figures_of_the_run_folders(resumed: tuple[StudyFolder, Finished], tmp_path: Path) -> None:
    sizes = read_sizes(resumed[0].path, warmup_steps=2)
    assert [(size.ranks, size.runs[0].global_batch, size.runs[0].last_step) for size in sizes] == [
        (1, 64, 8),
        (2, 128, 8),
    ]
    with open_browser(tmp_path / "profile") as browser:
        shown = look_at(browser, resumed[0].report)
    for check in (check_table, check_points, check_charts, check_losses):
        check(sizes, shown)


def _speed(outcome) -> float:
    return statistics.median(window.samples_per_second for window in outcome.windows)


def _check_table(done: Finished, speeds: list[float]) -> None:
    """Speeds and efficiency as they follow from the run folders."""
    rows = [line.split() for line in done.out.splitlines() if re.match(r" +[12] +(64|128)", line)]
    assert [row[:4] for row in rows] == [
        ["1", "64", "finished", f"{speeds[0]:,.0f}"],
        ["2", "128", "finished", f"{speeds[1]:,.0f}"],
    ]
    assert [row[5] for row in rows] == ["100%", f"{speeds[1] / speeds[0] / 2:.0%}"]


def test_a_study_is_planned_without_torch(tmp_path: Path) -> None:
    words = ["scale", "digits", "--ranks", "1,3", "--mode", "strong"]
    done = command(sys.executable, "-c", PROBE, *words, cwd=tmp_path)
    assert "ranks=3: batch.global=64 does not split over 3 ranks" in done.err
    assert done.out == "2 []\n"


def test_a_point_that_cannot_begin_keeps_its_folder_and_says_why(tutti: Tutti, tmp_path: Path) -> None:
    point = tmp_path / "points" / "x"
    (point / "logs").mkdir(parents=True)
    (tmp_path / "study.json").touch()
    (point / "config.yaml").write_text(resolve("digits/mlp", ["model.hidden=[4000000000000]"]).config.as_yaml())
    done = tutti("train", str(point))
    assert done.code == 1 and "an allocation of 931 TiB failed" in done.err
    record = json.loads((point / "record.json").read_text())
    assert (record["state"], record["cause"]) == ("failed", "out_of_memory")
    assert "an allocation of 931 TiB failed" in record["failure"] and "\n" not in record["failure"]
    assert (point / "config.yaml").exists()


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(tutti: Tutti, tmp_path: Path) -> None:
    words = [PYTHON, "-m", "tutti", "sweep", "digits/mlp", "--set", "epochs=400", "checkpoint.every_epochs=1"]
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    saved = "runs/studies/*/*/*/points/400-r1/checkpoints/latest"
    wait_until(lambda: list(tmp_path.glob(saved)), lambda: "no checkpoint", process)
    process.terminate()
    told = process.communicate()[1].decode()
    assert process.returncode == 75
    assert told.startswith("stopped by a signal, with 1 of 1 points left. Resume with: tutti sweep --resume runs/")
    folder = study_in(tmp_path)
    assert read_state(folder, "400-r1").state == "waiting"
    config = folder.run("400-r1").config
    config.write_text(config.read_text().replace("epochs: 400", "epochs: 40"))
    done = tutti("sweep", "--resume")
    assert done.code == 0, done.all
    record = json.loads(folder.run("400-r1").record.read_text())
    assert (record["state"], len(record["segments"])) == ("finished", 2)
    steps = [losses[0] for losses in read_outcomes(folder, read_definition(folder))[0].losses]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_a_sweep_that_was_killed_twice_gives_the_same_report(tmp_path: Path) -> None:
    """Killed in the middle of a point, which goes on from its checkpoint, and as another point begins."""
    words = ["sweep", "digits/mlp", "--set", "optim.lr=1e-3,2e-3,4e-3", "--target", "valid_accuracy=0.95"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for place in (whole, killed):
        place.mkdir()
    run(whole, *words)
    folder = kill_at("points/2e-3-r1/checkpoints/latest", killed, *words)
    assert 0 < _trained(folder, "2e-3-r1") < _trained(folder, "1e-3-r1") == 20
    again = ["sweep", "--resume", str(folder.path)]
    kill_at("states/4e-3-r1.json", killed, *again)
    assert read_state(folder, "4e-3-r1").state == "running" and not folder.run("4e-3-r1").metrics.exists()
    run(killed, *again)

    told, expected = _what_was_learned(folder), _what_was_learned(study_in(whole))
    assert [point.pop("remarks") for point in told["points"]] == ["", "2 attempts", "2 attempts"]
    assert {point.pop("remarks", "") for point in expected["points"]} == {""}
    assert told == expected
    assert len(told["losses"]) == len(told["csv"]) == len(told["points"]) == 3
    assert len(told["conclusions"]) > 1


def _trained(folder: StudyFolder, point: str) -> int:
    """Epochs that a run has trained."""
    return folder.run(point).metrics.read_text().count('"event": "epoch"')


def _what_was_learned(folder: StudyFolder) -> dict[str, Any]:
    """All that a report says, less times and places."""
    timed = re.compile(r"samples|share|outlier|seconds|time|folder|range|communication|windows")
    page, charts = folder.report, figures_in(folder.report)
    conclusions = re.findall(r"<li>(.*?)</li>", page.read_text().partition("<script")[0], re.DOTALL)

    def plain(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        kept = [{title: cell for title, cell in row.items() if not timed.search(title)} for row in rows]
        return [row | {"remarks": _without_outliers(row["remarks"])} if "remarks" in row else row for row in kept]

    return {
        "states": [read_state(folder, point.id).state for point in read_definition(folder).points],
        "conclusions": [sentence for sentence in conclusions if "outlier" not in sentence.lower()],
        "settings": plain(rows_in(page, "settings-title")),
        "points": [{"remarks": ""} | row for row in plain(rows_in(page, "points-title"))],
        "csv": plain(lines_in(page.with_name("points.csv"))),
        "metric": charts["metric"],
        "steps": charts["steps"],
        "solution": [trace["x"] for trace in charts["solution"]["data"]],
        "losses": [(trace["name"], trace["x"], trace["y"]) for trace in charts["losses"]["data"]],
    }


def _without_outliers(remarks: str) -> str:
    return "; ".join(remark for remark in remarks.split("; ") if "outlier" not in remark)


@pytest.mark.slow
def test_a_sweep_tells_what_failed_and_shows_the_rest(tutti: Tutti, tmp_path: Path) -> None:
    """One learning rate diverges; one network is larger than any memory."""
    grid = ["--set", "optim.lr=2e-3,1e30", "--set", "model.hidden=[32],[4000000000000]"]
    done = tutti("sweep", "digits/mlp", "epochs=1", *grid)
    assert done.code == 0, done.all
    folder = study_in(tmp_path)
    names = ("2e-3_32-r1", "2e-3_4000000000000-r1", "1e30_32-r1", "1e30_4000000000000-r1")
    found = {name: read_state(folder, name) for name in names}
    assert [state.state for state in found.values()] == ["finished", "failed", "failed", "failed"]
    reasons = {name: state.reason or "" for name, state in found.items()}
    assert reasons["1e30_32-r1"].startswith("the loss is nan at step 2")
    assert "an allocation of 931 TiB failed" in reasons["2e-3_4000000000000-r1"]
    assert f"run what failed again: tutti sweep --resume {folder.path.relative_to(tmp_path)} --retry" in done.out
    again = tutti("sweep", "--resume", str(folder.path))
    assert (again.code, "point 1" in again.out) == (0, False)
    _check_failures(folder, reasons)


def _check_failures(folder: StudyFolder, reasons: dict[str, str]) -> None:
    """Page, table and CSV name what failed and why, and show what did not."""
    page = folder.report
    assert "3 of 4 points failed" in page.read_text()
    points = {row["point"]: row for row in rows_in(page, "points-title")}
    lines = {line["id"]: line for line in lines_in(page.with_name("points.csv"))}
    assert set(points) == set(lines) == set(reasons)
    for name, reason in reasons.items():
        assert points[name]["state"] == lines[name]["state"] == ("failed" if reason else "finished")
        assert reason in points[name]["remarks"] and lines[name]["reason"] == reason
    assert lines["1e30_32-r1"]["collapse"] == "the loss is not finite"
    done = read_outcomes(folder, read_definition(folder))[0].epochs[-1].metrics["valid_accuracy"]
    assert float(lines["2e-3_32-r1"]["final_valid_accuracy"]) == done
    assert points["2e-3_32-r1"]["final validation accuracy"] == f"{100 * done:.2f}%"
    chart = {trace["name"]: trace for trace in figures_in(page)["metric"]["data"]}
    assert chart["model.hidden [32]"]["y"] == [done]
    assert chart["collapsed, model.hidden [32]"]["x"] == [1e30]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scale"], "no recipe is given: expected tutti scale RECIPE --ranks 1,2,4 --mode weak."),
        (["scale", "digits", "--mode", "weak"], "--ranks is missing. Add, for example, --ranks 1,2,4."),
        (["scale", "digits", "--ranks", "1,2", "--mode", "week"], "--mode 'week': expected weak"),
        (["scale", "--resume", "nowhere"], "nowhere holds no study"),
        (["scale", "--resume", "x", "--mode", "weak"], "--resume with --mode: a study resumes as it was defined."),
        (["sweep", "digits", "--set", "a.b=1", "--time", "30"], "--time 30 is for points that are jobs"),
        (["sweep", "digits", "--set", "epochs=1,2", "--retry"], "--retry without --resume"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tutti.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tutti", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []
