"""What `tutti train FOLDER` answers for a run that has ended, and what ranks import first."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import environment
from prepared import PYTHON
from waiting import wait_for_end

from tutti.cli.train import find_needs, is_finished
from tutti.config.load import load, resolve
from tutti.errors import ConfigError
from tutti.runs.folder import RunFolder, create_folder, write_config


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """The folder of a finished run: two epochs of ten steps."""
    folder = create_folder(str(tmp_path), "digits", 1)
    write_config(folder, resolve("digits", ["epochs=2", "batch.global=64"]).config.as_yaml())
    content = {"state": "finished", "step": 20, "ended_by": "epochs", "results": {"valid_accuracy": 0.9}}
    folder.record.write_text(json.dumps(content | {"plan": {"train_samples": 640}}))
    return folder


def ask(run: RunFolder, *overrides: str, saved: bool = True) -> bool:
    config = resolve(str(run.config), list(overrides)).config
    return is_finished(run, run.checkpoints / "step-000020" if saved else None, config, list(overrides), 1)


def test_nothing_is_left_to_do_for_a_finished_run(run: RunFolder) -> None:
    assert ask(run)
    assert ask(run, "epochs=2"), "no other value than it has"


def test_more_epochs_extend_a_finished_run(run: RunFolder) -> None:
    assert not ask(run, "epochs=3")
    assert not ask(run, "epochs=3", "optim.lr=0.5")


@pytest.mark.parametrize(
    "overrides", [["optim.lr=0.5"], ["epochs=1"], ["max_steps=15"], ["stop_at.valid_accuracy=0.8"]]
)
def test_overrides_without_an_effect_are_refused(run: RunFolder, overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        ask(run, *overrides)
    given = " ".join(overrides)
    assert str(refused.value) == (
        f"the run in {run.path} is finished after step 20, and it has ended by epochs: {given} would have no effect. "
        "Extend it with a larger epochs= or max_steps=, or start a new run with: "
        f"tutti train digits {given}"
    )


def test_a_run_without_a_checkpoint_cannot_be_extended(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"and it has no checkpoint to continue from: epochs=3 would have no effect"):
        ask(run, "epochs=3", saved=False)


def test_a_run_that_has_not_ended_is_not_finished(run: RunFolder) -> None:
    run.record.write_text(json.dumps({"state": "interrupted", "step": 20}))
    assert not ask(run, "optim.lr=0.5")


@pytest.mark.system
@pytest.mark.parametrize(
    "command",
    [
        ["train", "digits/mlp", "-n", "2", "epochs=1"],
        ["bench", "digits/mlp", "--seconds", "1"],
        ["scale", "digits/mlp", "--ranks", "1", "--mode", "weak", "--steps", "4", "--warmup", "2"],
    ],
    ids=lambda command: command[0],
)
def test_a_command_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path, command: list[str]) -> None:
    """As with `| head`: the run ends as any other, and its record says so."""
    read, write = os.pipe()
    words = [PYTHON, "-m", "tutti", *command, f"out={tmp_path}"]
    with subprocess.Popen(words, env=environment(), stdout=write, stderr=subprocess.PIPE, text=True) as process:
        os.close(read)
        os.close(write)
        code = wait_for_end(process, lambda: "the command does not end")
        assert process.stderr is not None and (process.stderr.read(), code) == ("", 0)
    (record,) = tmp_path.glob("**/record.json")
    assert json.loads(record.read_text())["state"] == "finished"


@pytest.mark.parametrize("framework", ["keras", "tensorflow"])
def test_ranks_load_triton_before_tensorflow(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the other order Triton, which torch has where there are GPUs, ends the process with SIGSEGV."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    needs = find_needs(load("mnist/keras", f"framework={framework}"))
    assert needs.index("triton") < needs.index("tensorflow")
