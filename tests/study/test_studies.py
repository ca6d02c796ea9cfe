"""`tutti scale` and `tutti sweep` on real ranks: killed and resumed, and with points that fail."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Finished, Tutti, command, environment

from tutti.study.definition import StudyFolder, read_definition, read_state
from tutti.study.outcome import SHARES, read_outcomes

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("studies")]

SCALE = ["scale", "digits/mlp", "--ranks", "1,2", "--mode", "weak", "--steps", "6", "--warmup", "2"]
DEADLINE_SECONDS = 120.0
PROBE = """
import sys
from tutti.cli.main import main
sys.argv = ["tutti", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    print(end.code, [name for name in ("torch", "sklearn", "matplotlib", "plotly") if name in sys.modules])
"""


def study_in(tmp_path: Path) -> StudyFolder:
    (path,) = tmp_path.glob("runs/studies/digits/mlp/*/study.json")
    return StudyFolder(path.parent)


def kill_during(point: str, tmp_path: Path) -> StudyFolder:
    """Start the study, and kill it and its process group when a point runs."""
    words = [sys.executable, "-m", "tutti", *SCALE]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment(), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not list(tmp_path.glob(f"runs/studies/*/*/*/states/{point}.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return study_in(tmp_path)


def test_a_killed_study_of_ranks_goes_on_and_gives_all_its_points(tutti: Tutti, tmp_path: Path) -> None:
    folder = kill_during("n2-r1", tmp_path)
    assert [read_state(folder, name).state for name in ("n1-r1", "n2-r1")] == ["finished", "running"]
    measured = folder.run("n1-r1").metrics.read_bytes()

    done = tutti("scale", "--resume", str(folder.path))
    assert done.code == 0, done.all
    assert folder.run("n1-r1").metrics.read_bytes() == measured
    one, two = read_outcomes(folder, read_definition(folder))
    assert (one.is_finished, two.is_finished, two.state.attempts) == (True, True, 2)
    assert [each.plan["global_batch"] for each in (one, two)] == [64, 128]
    assert [window.step for window in two.windows] == [3, 4, 5, 6, 7, 8]
    assert all(set(window.shares) == set(SHARES) for window in two.windows)
    assert f"report: {folder.report}" in done.out and folder.report.is_file()
    _check_table(done, [_speed(one), _speed(two)])


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
    assert "ranks=3: batch.global=64 does not split over 3 rank(s)" in done.err
    assert done.out == "2 []\n"


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(tutti: Tutti, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tutti", "sweep", "digits/mlp", "--set", "epochs=400", "checkpoint.every_epochs=1"]
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not list(tmp_path.glob("runs/studies/*/*/*/points/400-r1/checkpoints/latest")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    told = process.communicate(timeout=DEADLINE_SECONDS)[1].decode()
    assert process.returncode == 75
    assert told.startswith("stopped from outside, with 1 of 1 points left. Go on with: tutti sweep --resume runs/")
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
def test_a_sweep_tells_what_failed_and_shows_the_rest(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("sweep", "digits/mlp", "epochs=1", "--set", "optim.lr=2e-3,1e30", "--set", "batch.global=64,256")
    assert done.code == 0, done.all
    folder = study_in(tmp_path)
    found = {name: read_state(folder, name) for name in ("2e-3_64-r1", "2e-3_256-r1", "1e30_64-r1", "1e30_256-r1")}
    assert [state.state for state in found.values()] == ["finished", "finished", "failed", "failed"]
    assert (found["1e30_64-r1"].reason or "").startswith("the loss is nan at step 2")
    assert f"run what failed again: tutti sweep --resume {folder.path.relative_to(tmp_path)} --retry" in done.out
    again = tutti("sweep", "--resume", str(folder.path))
    assert (again.code, "point 1" in again.out) == (0, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scale"], "no recipe is given: expected tutti scale RECIPE --ranks 1,2,4 --mode weak."),
        (["scale", "digits", "--mode", "weak"], "--ranks is missing. Say --ranks 1,2,4, for example."),
        (["scale", "digits", "--ranks", "1,2", "--mode", "week"], "--mode 'week': expected weak"),
        (["scale", "--resume", "nowhere"], "nowhere holds no study"),
        (["scale", "--resume", "x", "--mode", "weak"], "--resume with --mode: a study goes on as it was defined."),
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
