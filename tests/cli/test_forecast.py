"""`tutti forecast` from tables and studies."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import Call, command
from run_folders import bench_run, train_run
from study_folders import Made, scale_study

TABLE = "ranks,nodes,samples_per_second\n1,1,100\n4,1,380\n8,2,740\n16,4,1440\n"
ONE_NODE = "ranks,nodes,samples_per_second,per_rank_batch\n1,1,100,32\n4,1,380,32\n"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_tutti: Call) -> Call:
    """The command in this process, in a folder with a table of four nodes and one of one node."""
    monkeypatch.chdir(tmp_path)
    Path("points.csv").write_text(TABLE)
    Path("one.csv").write_text(ONE_NODE)
    Path("from_four.csv").write_text(TABLE.replace("1,1,100\n", ""))

    return partial(call_tutti, "forecast")


def test_a_table_is_forecast_on_the_screen(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("--table", "points.csv", "--ranks", "256,32", "--fabric", "hpc", "--efficiency", "80%")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["ranks", "nodes", "samples/s"]
    assert [line.split()[0] for line in lines[1:3]] == ["32", "256"]
    assert "from measurements on 1, 2, 4 nodes, HPC fabric" in out
    assert "An efficiency of 80% is reached on 32 ranks" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from_four.csv", "one.csv", "points.csv"]


def test_json_holds_what_a_script_needs(call: Call) -> None:
    code, out, _ = call("--table", "points.csv", "--ranks", "2,32", "--fabric", "tcp", "--json")
    assert code == 0
    inside, beyond = json.loads(out)
    assert (inside["ranks"], beyond["ranks"], beyond["nodes"]) == (2, 32, 8)
    for each in (inside, beyond):
        assert each["interval90"][0] < each["interval68"][0] < each["samples_per_second"] < each["interval68"][1]
        assert 0 < each["efficiency"] < 1.1
        assert isinstance(each["warnings"], list)
    assert inside["basis"].startswith("interpolated between measurements")
    assert beyond["extrapolation"] == 2


def test_one_node_gives_no_forecast_but_a_band_or_a_link(call: Call) -> None:
    words = ("--table", "one.csv", "--ranks", "16", "--fabric", "hpc")
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert "everything was measured on one node" in err
    assert "Measure 2 nodes" in err
    code, out, _ = call(*words, "--band")
    assert code == 0
    assert "not a forecast" in out
    band = json.loads(call(*words, "--band", "--json")[1])[0]
    assert band["samples_per_second"] is None
    assert band["basis"].startswith("not a forecast")
    linked = json.loads(call(*words, "--link", "200Gbit,3us", "--gradients", "100MB", "--json")[1])[0]
    assert band["interval90"][0] < linked["interval90"][0] < linked["samples_per_second"]
    assert linked["basis"].endswith("link 200Gbit,3us")


def test_full_nodes_can_be_asked_for(call: Call) -> None:
    made = json.loads(call("--table", "points.csv", "--nodes", "8,16", "--fabric", "hpc", "--json")[1])
    assert [each["ranks"] for each in made] == [32, 64]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "8"], ["none is given", "--table FILE"]),
        (["--table", "points.csv"], ["--ranks is missing"]),
        (["--table", "points.csv", "--ranks", "8,x"], ["--ranks 8,x", "whole numbers"]),
        (["--table", "points.csv", "--ranks", "0"], ["--ranks 0"]),
        (["--table", "points.csv", "--ranks", "8", "--fabric", "tpc"], ["--fabric tpc", "Did you mean 'tcp'"]),
        (["--table", "points.csv", "--ranks", "8", "--mode", "week"], ["--mode 'week'", "weak"]),
        (["--table", "points.csv", "--ranks", "8", "--efficiency", "x"], ["--efficiency x"]),
        (["--table", "points.csv", "--ranks", "8", "--efficiency", "180%"], ["--efficiency 180%"]),
        (["--table", "points.csv", "--ranks", "8", "--ranks-per-node", "0"], ["--ranks-per-node 0"]),
        (["--table", "one.csv", "--ranks", "8", "--link", "200,3"], ["200 is no number with a unit"]),
        (["--table", "one.csv", "--ranks", "8", "--link", "1Gbit,3us"], ["--gradients BYTES"]),
        (["--table", "points.csv", "--verify"], ["--out FOLDER"]),
        (["--table", "nowhere.csv", "--ranks", "8"], ["nowhere.csv", "cannot be read"]),
        (["nowhere", "--ranks", "8"], ["nowhere is no run"]),
        (["--table", "from_four.csv", "--ranks", "2"], ["2 ranks: fewer than any measured", "expected 4 or more"]),
    ],
)
def test_bad_input_is_named_with_its_fix(call: Call, words: list[str], message: list[str]) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    for each in message:
        assert each in err


def test_a_forecast_is_kept_drawn_and_verified(call: Call, tmp_path: Path) -> None:
    words = ("--table", "points.csv", "--fabric", "hpc", "--out", "proposal")
    code, out, _ = call(*words, "--ranks", "32,64")
    assert code == 0
    assert "picture:" in out
    assert (tmp_path / "proposal" / "forecast.png").stat().st_size > 5000
    assert len(list((tmp_path / "proposal" / "forecasts").glob("*.json"))) == 1
    assert "No run was measured" in call(*words, "--verify")[1]
    Path("points.csv").write_text(TABLE + "32,8,2800\n")
    out = call(*words, "--verify")[1]
    assert "1 forecast checked" in out
    assert "1 inside 90%" in out
    found = json.loads(call(*words, "--verify", "--json")[1])
    assert found["record"]["points"] == 1
    assert found["checked"][0]["measured"] == 2800
    assert [each["ranks"] for each in found["open"]] == [64]


def test_verifying_writes_a_page_of_all_forecasts(call: Call, tmp_path: Path) -> None:
    words = ("--table", "points.csv", "--fabric", "hpc", "--out", "proposal")
    call(*words, "--ranks", "32,64")
    out = call(*words, "--verify")[1]
    page = tmp_path / "proposal" / "forecasts.html"
    assert out.splitlines()[-1].split() == ["page:", "proposal/forecasts.html"]
    assert "No run was measured that a kept forecast was made for." in page.read_text()
    Path("points.csv").write_text(TABLE + "32,8,900\n")
    call(*words, "--verify")
    text = page.read_text()
    assert "1 forecast checked: off by" in text
    assert "0 inside 90%" in text
    assert "<svg" in text
    digest = next((tmp_path / "proposal" / "forecasts").glob("*.json"))
    assert text.count(f'<a href="forecasts/{digest.name}">{digest.stem}</a>') == 2  # the checked one and the open one
    assert '<a href="../points.csv">900</a>' in text
    assert "from measurements on 1, 2, 4 nodes, HPC fabric" in text
    assert not re.search(r'(src|href)="(?!forecasts/|\.\./points|data:)', text.partition("<svg")[0])


def test_the_page_cannot_be_written_into_a_file(call: Call) -> None:
    call("--table", "points.csv", "--fabric", "hpc", "--out", "proposal", "--ranks", "32")
    Path("proposal/forecasts.html").mkdir()
    code, _, err = call("--table", "points.csv", "--out", "proposal", "--verify")
    assert code == 2
    assert "forecasts.html: cannot be written" in err


def make_study(name: str, *ranks: int, batch: int = 32) -> str:
    """A study with one rank on a node, as in runs/studies."""
    folder = scale_study(
        Path("runs", "studies", "digits", name),
        lambda point: Made(100.0 * point.ranks, per_rank_batch=batch),
        ranks=ranks,
    )
    for record in folder.points.glob("*/record.json"):
        content = json.loads(record.read_text())
        content["segments"][0]["hosts"] = [f"n{rank}" for rank in range(content["ranks"])]
        record.write_text(json.dumps(content))
    return str(folder.path)


def test_a_study_is_forecast_and_checked_by_a_later_one(call: Call) -> None:
    first = make_study("first", 1, 2)
    code, out, _ = call(first, "--ranks", "4", "--fabric", "hpc")
    assert code == 0
    assert "from measurements on 1, 2 nodes" in out
    assert (Path(first) / "forecasts").is_dir()
    assert (Path(first) / "forecast.png").exists()
    assert "No run was measured" in call("--verify")[1]
    other = make_study("other", 4, batch=64)
    assert "No run was measured" in call(other, "--verify")[1]
    later = make_study("later", 4)
    scale_study(Path("runs/studies/digits/waiting"), lambda point: None)
    for words in (["--verify"], [later, "--verify"]):
        assert "1 forecast checked" in call(*words)[1]
    assert 'href="studies/digits/later/">' in Path("runs/forecasts.html").read_text()
    assert Path(later, "forecasts.html").exists()


def test_a_study_knows_its_mode(call: Call) -> None:
    code, _, err = call(make_study("first", 1, 2), "--ranks", "4", "--mode", "weak")
    assert code == 2
    assert "a study knows its mode" in err


def test_nothing_to_verify_is_an_error(call: Call) -> None:
    Path("runs").mkdir()
    code, _, err = call("--verify")
    assert code == 2
    assert "runs holds no forecast" in err


@pytest.mark.system
def test_a_forecast_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text(TABLE)
    words = ("forecast", "--table", "points.csv", "--ranks", "4096", "--fabric", "hpc", "--json")
    done = command(sys.executable, "-X", "importtime", "-m", "tutti", *words, cwd=tmp_path)
    assert done.code == 0
    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
    assert "tutti.forecast.posterior" in imported
    assert not imported & {"torch", "tensorflow", "scipy", "matplotlib", "pandas"}


def test_one_bench_is_enough_with_a_link(call: Call, tmp_path: Path) -> None:
    bench_run(tmp_path / "bench", 2)
    words = ("bench", "--ranks", "8", "--fabric", "tcp")
    assert call(*words)[0] == 2
    code, out, _ = call(*words, "--link", "1Gbit,50us", "--json")
    assert code == 0
    [made] = json.loads(out)
    assert made["nodes"] == 4
    assert made["interval90"][0] < made["samples_per_second"] < 4 * 16 / 0.11


def test_runs_are_forecast_together(call: Call, tmp_path: Path) -> None:
    for ranks in (1, 2):
        train_run(tmp_path / f"run-{ranks}", ranks, ranks, speed=90.0 * ranks + 10)
    code, out, _ = call("run-1", "run-2", "--ranks", "4", "--fabric", "hpc")
    assert code == 0
    assert "from measurements on 1, 2 nodes, HPC fabric" in out
