"""The examples run as their first lines say."""

import json
import re
from pathlib import Path

import prepared
import pytest
from conftest import REPOSITORY, Tutti, command
from prepared import PYTHON

from tutti.data.make_images import make_images

pytestmark = pytest.mark.ranks
EXAMPLES = REPOSITORY / "examples"


def test_own_parts_through_a_recipe_on_one_and_two_ranks(tutti: Tutti, tmp_path: Path) -> None:
    results = []
    for ranks in ("1", "2"):
        done = tutti("train", str(EXAMPLES / "own_model.yaml"), "-n", ranks, f"out=on-{ranks}", "epochs=3")
        assert done.code == 0, done.all
        results.append(json.loads(next((tmp_path / f"on-{ranks}").rglob("record.json")).read_text())["results"])
    assert results[0]["valid_channel_error"] < 1
    assert results[1] == pytest.approx(results[0], abs=1e-3)


def test_own_parts_through_python(tmp_path: Path) -> None:
    done = command(PYTHON, str(EXAMPLES / "own_model.py"), cwd=tmp_path)
    assert done.code == 0, done.all
    assert "run folder: runs/own_model/" in done.out


def test_own_parts_through_python_on_two_ranks(tutti: Tutti) -> None:
    done = tutti("run", "-n", "2", str(EXAMPLES / "own_model.py"))
    assert done.code == 0, done.all
    assert done.out.count("run folder: runs/own_model/") == 2  # of the run, and of the script's logs
    assert "channels" in done.out


@pytest.mark.slow
@pytest.mark.xdist_group("tensorflow")
@pytest.mark.parametrize("source", ["generated", "files"])
def test_resnet34_in_tensorflow_on_two_ranks(tutti: Tutti, tmp_path: Path, source: str) -> None:
    prepared.server(prepared.TENSORFLOW)
    words = ["run", "-n", "2", str(EXAMPLES / "horovod" / "tensorflow2_resnet34.py"), "--checkpoints", "saved"]
    if source == "files":
        make_images(tmp_path / "tree", classes=2, train=8, valid=1, size=48)
        words += ["--data", "tree", "--batch-size", "2", "--steps", "2"]
    done = tutti(*words, **prepared.variables(prepared.TENSORFLOW))
    assert done.code == 0, done.all
    assert "ResNet-34, 21,306,826 parameters, 2 rank(s)" in done.out
    assert "weights on 2 rank(s): identical" in done.out
    assert (tmp_path / "saved" / "resnet34.weights.h5").stat().st_size > 4 * 21_306_826
    first, last = (
        float(each) for each in re.findall(r"loss of the first step ([\d.]+), of the last ([\d.]+)", done.out)[0]
    )
    assert source == "files" or last < first


@pytest.mark.slow
@pytest.mark.xdist_group("tensorflow")
def test_resnet34_in_tensorflow_refuses_a_folder_without_images(tmp_path: Path) -> None:
    prepared.server(prepared.TENSORFLOW)
    (tmp_path / "train" / "class").mkdir(parents=True)
    script = EXAMPLES / "horovod" / "tensorflow2_resnet34.py"
    done = command(
        PYTHON, str(script), "--data", str(tmp_path), cwd=tmp_path, **prepared.variables(prepared.TENSORFLOW)
    )
    assert done.code == 2
    assert f"--data {tmp_path}: expected images in {tmp_path}/train/CLASS/, found none" in done.err


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter
def test_the_notebook_trains_on_two_ranks(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    results = [cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    trained, same, figure, failed = results
    printed = "".join(output.get("text", "") for output in trained)
    assert "2 ranks on cpu" in printed and "epoch 5/5" in printed
    assert float(trained[-1].data["text/plain"]) < 0.05
    assert same[0].data["text/plain"] == "True"
    assert "image/png" in figure[0].data
    assert "rank 0: ZeroDivisionError: division by zero" in failed[0].text
