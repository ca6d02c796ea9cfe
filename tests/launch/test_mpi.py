"""Real MPI launchers: ranks started by mpirun and mpiexec join with no flag of ours."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import command
from prepared import PYTHON

pytestmark = pytest.mark.system

LAUNCHERS = {
    "Open MPI": ["mpirun.openmpi", "--oversubscribe"],
    "MPICH": ["mpiexec.mpich"],
}
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def launch(launcher: str, ranks: int, *words: str, cwd: Path):
    program, *flags = LAUNCHERS[launcher]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed here")
    count = "-np" if launcher == "Open MPI" else "-n"
    return command(program, *flags, count, str(ranks), PYTHON, "-m", "tutti", *words, cwd=cwd, **ROOT)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_four_ranks_train_the_digits(launcher: str, tmp_path: Path) -> None:
    done = launch(launcher, 4, "train", "digits", "epochs=3", cwd=tmp_path)
    assert done.code == 0, done.all
    folders = list((tmp_path / "runs" / "digits").iterdir())
    assert len(folders) == 1, "four ranks share one run folder"
    record = json.loads((folders[0] / "record.json").read_text())
    assert record["state"] == "finished"
    assert record["ranks"] == 4
    assert record["segments"][0]["launcher"] == launcher
    assert record["results"]["valid_accuracy"] > 0.9
    assert sorted(path.name for path in (folders[0] / "logs").iterdir()) == [f"rank-{r}.log" for r in range(4)]
    assert done.out.count("run folder:") == 1


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_mistake_is_told_once_for_all_ranks(launcher: str, tmp_path: Path) -> None:
    done = launch(launcher, 2, "train", "mnist", "data.path=nowhere", cwd=tmp_path)
    assert done.code != 0
    assert done.all.count("error: MNIST file train-images-idx3-ubyte[.gz] is not in nowhere") == 1
    assert not (tmp_path / "runs").exists()


def test_starting_ranks_under_a_launcher_is_refused(tmp_path: Path) -> None:
    done = launch("Open MPI", 2, "train", "digits", "-n", "3", cwd=tmp_path)
    assert done.code != 0
    assert "-n 3, but Open MPI has already started 2 ranks" in done.all


def test_any_script_finds_torchruns_variables(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "assert total.item() == 2\n"
        "dist.destroy_process_group()\n"
    )
    done = launch("Open MPI", 2, "run", "script.py", cwd=tmp_path)
    assert done.code == 0, done.all
