"""Runs side by side: differences, results, and errors for what cannot be compared."""

import re
import sys
from pathlib import Path

import pytest
from conftest import command
from run_folders import make_run

from tutti.cli.runs import compare
from tutti.cli.runs import runs as list_runs
from tutti.errors import ConfigError, FolderError
from tutti.runs.folder import RunFolder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    slow = make_run(tmp_path / "runs" / "digits" / "2026-11-15_101500_n2")
    fast = make_run(
        tmp_path / "runs" / "digits" / "2026-11-15_101600_n4",
        "optim={name: lars, lr: 1.0}",
        ranks=4,
        step_seconds=0.25,
        segment={"versions": {"torch": "2.14.0"}},
    )
    return [str(slow.path), str(fast.path)]


def table(text: str) -> dict[str, list[str]]:
    """The cells of each row by its title."""
    rows = [re.split(r"\s{2,}", line.rstrip()) for line in text.splitlines() if line.strip()]
    return {title: cells for title, *cells in rows}


def test_rows_show_what_differs_and_nothing_that_does_not(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(runs, tmp_path, None)
    rows = table(capsys.readouterr().out)
    assert rows[""] == ["digits_2026-11-15_101500_n2", "digits_2026-11-15_101600_n4"]
    assert rows["ranks"] == ["2", "4"]
    assert rows["batch per rank"] == ["32", "16"]
    assert rows["peak learning rate"] == rows["optim.lr"] == ["0.002", "1"]
    assert rows["optim.name"] == ["adamw", "lars"]
    assert rows["optim.betas"] == ["[0.9, 0.999]"] and rows["optim.eta"] == ["0.001"]
    assert rows["version of torch"] == ["2.13.0", "2.14.0"]
    assert not {"global batch", "model.name", "device", "host", "out", "seed"} & rows.keys()


def test_results_are_those_of_the_run_folders(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(runs, tmp_path, None)
    rows = table(capsys.readouterr().out)
    assert rows["final validation accuracy"] == ["90.00%", "90.00%"]
    assert rows["best validation accuracy"] == ["94.00% (epoch 1)", "94.00% (epoch 1)"]
    assert rows["final validation loss"] == ["0.3750", "0.3750"]
    assert rows["final training loss"] == ["0.2500", "0.2500"]
    assert rows["training time"] == ["8.50 s", "4.25 s"]  # the first step takes ten times as long
    assert rows["samples/s"] == ["128", "256"]  # and is left out of the speed
    assert rows["data loading"] == ["10.0%", "10.0%"]
    assert rows["compute"] == ["60.0%", "60.0%"]
    assert rows["communication"] == ["15.0%", "15.0%"]
    assert rows["straggler"] == ["5.0%", "5.0%"]
    assert rows["run folder"] == runs


def test_runs_without_metrics_or_with_truncated_ones_have_a_column(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    young, timed = (make_run(tmp_path / "runs" / "digits" / name) for name in ("young", "timed"))
    young.metrics.unlink()
    young.config.unlink()
    lines = [line for line in timed.metrics.read_text().splitlines() if '"event": "step"' in line]
    timed.metrics.write_text("\n".join([*lines, '{"event": "st']))
    compare([runs[0], "young", "timed"], tmp_path / "runs", tmp_path / "c.svg")
    printed = capsys.readouterr().out
    rows = table(printed)
    assert rows["steps"] == ["8", "8"] and rows["final loss"] == ["0.2500", "0.2500"]
    assert f"curves: {tmp_path / 'c.svg'}" in printed


def test_the_same_twice_differs_in_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name)
    compare(["a", "b"], tmp_path, None)
    assert "nothing differs" in capsys.readouterr().out


def test_curves_are_drawn_where_asked(runs: list[str], tmp_path: Path) -> None:
    compare(runs, tmp_path, tmp_path / "c.svg")
    drawn = (tmp_path / "c.svg").read_text()
    for words in ("loss by step", "loss by time", "accuracy by step", "accuracy by time", "seconds of training"):
        assert f"<!-- {words} -->" in drawn
    assert "digits_2026-11-15_101600_n4" in drawn


def test_what_cannot_be_compared_or_drawn_is_refused_before_anything_is_printed(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = runs
    for given, plot, words in (
        ([first], None, "expected two runs or more"),
        ([first, f"{second}/../2026-11-15_101500_n2"], None, "are the same run"),
        ([first, "absent"], None, "there is no run 'absent', here or in "),
        (runs, tmp_path / "c.txt", "c.txt: expected a file that ends in .png, .svg, .pdf."),
        (runs, tmp_path / "no" / "c.png", "c.png: there is no folder "),
    ):
        with pytest.raises((ConfigError, FolderError), match=re.escape(words)):
            compare(given, tmp_path, plot)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.glob("c.*"))


def test_a_file_that_cannot_be_written_is_named(runs: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.png").mkdir()
    with pytest.raises(ConfigError, match=r"--plot .*c\.png: cannot be written: Is a directory"):
        compare(runs, tmp_path, tmp_path / "c.png")


def test_the_table_of_runs_has_batch_and_time_and_can_be_sorted(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder(Path(runs[1])).metrics.write_text(
        '{"event": "epoch", "epoch": 1, "step": 1, "valid_loss": 9.0, "valid_accuracy": 0.5}\n'
    )

    def folders(sort: str) -> list[str]:
        list_runs(None, tmp_path / "runs", sort)
        return [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]

    assert folders("started") == folders("ranks") == runs
    assert folders("accuracy") == folders("loss") == folders("time") == folders("samples/s") == runs[::-1]
    with pytest.raises(ConfigError, match=r"--sort acuracy: expected one of started, .*\. Did you mean 'accuracy'\?"):
        folders("acuracy")
    list_runs(None, tmp_path / "runs")
    title, row, _ = capsys.readouterr().out.splitlines()
    assert (
        " ".join(title.split()) == "recipe state ranks epochs metrics samples/s batch time memory predicted run folder"
    )
    assert re.search(r" 128 +64 +8\.50 s  ", row)


@pytest.mark.system
def test_comparing_and_the_board_need_no_torch(tmp_path: Path) -> None:
    light = "import sys, tutti.cli.board, tutti.cli.runs, tutti.report.runs; print('torch' in sys.modules)"
    done = command(sys.executable, "-c", light, cwd=tmp_path)
    assert (done.code, done.out) == (0, "False\n"), done.all
