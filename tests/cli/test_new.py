"""`tutti new` writes a project that trains and passes its own tests, or nothing at all."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Call, Tutti, command
from prepared import PYTHON

from tutti.config.json_schema import header
from tutti.config.load import load


@pytest.mark.system
@pytest.mark.ranks
def test_a_new_project_trains_on_two_ranks_and_passes_its_tests(tutti: Tutti, tmp_path: Path) -> None:
    made = tutti("new", "planets")
    assert made.code == 0, made.all
    words = ("-m", "tutti", "train", "planets.yaml", "-n", "2", "data.samples=1024", "epochs=3")
    trained = command(PYTHON, *words, cwd=tmp_path / "planets")
    assert trained.code == 0, trained.all
    record = json.loads(next((tmp_path / "planets" / "runs").rglob("record.json")).read_text())
    assert record["results"]["valid_accuracy"] > 0.8
    tested = command(PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path / "planets")
    assert tested.code == 0 and "4 passed" in tested.out, tested.all
    words = ("-m", "tutti", "export", "latest", "--to", "torch", "--out", "model.pt")
    exported = command(PYTHON, *words, cwd=tmp_path / "planets")
    assert exported.code == 0 and re.match(r"planets, step \d+ \(best\): model.pt \(", exported.out), exported.all
    [program] = re.findall(r"```python\n(.*?)```", (tmp_path / "planets" / "README.md").read_text(), re.DOTALL)
    used = command(PYTHON, "-c", program, cwd=tmp_path / "planets")
    found, labels = re.findall(r"tensor\(\[([01, ]+)\]\)", used.out)
    assert sum(a == b for a, b in zip(found.split(", "), labels.split(", "), strict=True)) >= 6, used.all
    ruff = [str(Path(sys.executable).with_name("ruff")), "--isolated", "--no-cache", "--line-length=120"]
    for words in (["format", "--check"], ["check", "--select=E,F,W,I,B,UP,RUF"]):
        linted = subprocess.run([ruff[0], words[0], *ruff[1:], *words[1:], "."], cwd=tmp_path / "planets", check=False)
        assert linted.returncode == 0


def test_the_files_have_the_name_of_the_project(call_tutti: Call, tmp_path: Path) -> None:
    project = tmp_path / "below" / "stars2"
    code, out, err = call_tutti("new", str(project))
    assert (code, err) == (0, "")
    assert f"cd {project}\n  tutti train stars2.yaml -n 2" in out
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    package = {f"stars2/{name}.py" for name in ("__init__", "data", "model")}
    assert files == package | {"README.md", "stars2.yaml", "recipe.schema.json", "test_stars2.py", ".gitignore"}
    assert not [file for file in files if "PROJECT" in (project / file).read_text()]
    assert (project / "stars2.yaml").read_text().startswith(f"{header()}\n")
    assert load(str(project / "stars2.yaml/large")).data.name == "stars2.data:LightCurves"
    assert [path.name for path in project.parent.iterdir()] == ["stars2"]


@pytest.mark.parametrize(
    ("name", "fitting"),
    [
        ("my-project", "my_project"),
        ("3d", "d"),
        ("class", "class_project"),
        ("größe", "gr__e"),
        ("42", "project"),
        ("random", "my_random"),
        ("torch", "my_torch"),
        ("tutti", "my_tutti"),
    ],
)
def test_a_name_that_cannot_be_imported_is_refused(name: str, fitting: str, call_tutti: Call, tmp_path: Path) -> None:
    code, out, err = call_tutti("new", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert repr(name) in err and err.endswith(f"Try {tmp_path / fitting}.\n")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled_and_another_one_is_left_alone(call_tutti: Call, tmp_path: Path) -> None:
    (tmp_path / "stars").mkdir()
    assert call_tutti("new", str(tmp_path / "stars"))[0] == 0
    (tmp_path / "stars" / "stars.yaml").write_text("mine")
    code, _, err = call_tutti("new", str(tmp_path / "stars"))
    assert code == 2
    assert "stars: the folder is not empty: expected none, or an empty folder. Choose another name." in err
    assert (tmp_path / "stars" / "stars.yaml").read_text() == "mine"
    (tmp_path / "moons").touch()
    code, _, err = call_tutti("new", str(tmp_path / "moons"))
    assert code == 2 and "moons: there is such a file" in err


def test_a_folder_that_cannot_be_made_is_named(call_tutti: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = call_tutti("new", str(tmp_path / "file" / "stars"))
    assert code == 2
    assert "stars: cannot be made: Not a directory. Give a folder that can be written." in err
