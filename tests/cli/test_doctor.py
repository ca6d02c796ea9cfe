"""`tutti doctor` on the command line."""

import json
from pathlib import Path

import pytest
from conftest import Tutti

pytestmark = pytest.mark.xdist_group("doctor_command")


@pytest.mark.ranks
def test_two_ranks_of_this_machine_are_examined(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("doctor", "digits", "--json", "found.json")
    assert done.code == 0, done.all
    lines = done.out.splitlines()
    assert lines[0].split()[:3] == ["ranks", "host", "address"]
    assert lines[1].split()[0] == "0-1" and "127.0.0.1" in lines[1]
    assert any(line.startswith("all-reduce of 2 ranks over Gloo: 8 B in ") for line in lines)
    assert any(line.startswith("ready: 2 ranks on 1 host (") for line in lines)
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["ready"] and record["faults"] == []
    assert [each["rank"] for each in record["ranks"]] == [0, 1]
    assert [each["bytes"] for each in record["all_reduce"]] == [8, 8_000_000]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.ranks
def test_a_run_folder_is_examined_with_its_own_recipe_and_gets_the_record(tutti: Tutti, tmp_path: Path) -> None:
    shown = tutti("show", "mnist", "data.path=nowhere/mnist").out.partition("\non 1 rank")[0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(shown)
    done = tutti("doctor", "run", "-n", "1")
    assert done.code == 1
    assert done.err == ""
    assert "fault: no host has nowhere/mnist, where the recipe reads its data. Set data.path, or fetch it." in done.out
    assert done.out.splitlines()[-1].startswith("not ready: 1 fault (")
    assert json.loads((tmp_path / "run" / "doctor.json").read_text())["ready"] is False


@pytest.mark.system
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-n", "0"], "error: -n 0: expected 1 or more ranks."),
        (["nothing"], "error: "),
        (["digits", "optim.lrr=1"], "error: "),
        (["--wait", "0"], "error: --wait 0: expected a number of seconds above 0."),
        (["--json", "no/such/place.json"], "error: --json no/such/place.json: there is no folder "),
        (["--json", "/proc/found.json"], "error: --json '/proc': /proc cannot be written"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(
    words: list[str], expected: str, tutti: Tutti, tmp_path: Path
) -> None:
    done = tutti("doctor", *words)
    assert done.code == 2
    assert done.err.startswith(expected) and len(done.err.splitlines()) == 1
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
def test_a_number_of_ranks_that_contradicts_the_launcher_is_refused(tutti: Tutti) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    done = tutti("doctor", "-n", "2", **place, MASTER_ADDR="localhost", MASTER_PORT="1")
    assert done.code == 2
    assert done.err.startswith("error: -n 2, but ") and "Leave out -n under a launcher." in done.err
