"""The wheels of both distributions, installed into an environment of their own."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import REPOSITORY, environment

pytestmark = [pytest.mark.system, pytest.mark.slow]


def run(*words: object, cwd: Path) -> str:
    """Run a command of the environment without the variables that would lead to this tree."""
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with both wheels, and with this environment's other packages."""
    folder = tmp_path_factory.mktemp("wheels")
    for source in (REPOSITORY, REPOSITORY / "compat" / "horovod"):
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist", cwd=source)
    wheels = sorted((folder / "dist").glob("*.whl"))
    assert [wheel.name.split("-")[0] for wheel in wheels] == ["tutti_horovod", "tutti_train"]
    run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *wheels, cwd=folder)
    packages = {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))}
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (own / "others.pth").write_text("\n".join(sorted(packages)) + "\n")  # after those of the environment itself
    return python.parent


def test_all_comes_from_the_wheels(commands: Path, tmp_path: Path) -> None:
    found = run(
        commands / "python", "-c", "import horovod, tutti; print(tutti.__file__, horovod.__file__)", cwd=tmp_path
    )
    assert all(Path(path).is_relative_to(commands.parent) for path in found.split())
    complaints = subprocess.run(
        [commands / "python", "-m", "pip", "check"], capture_output=True, text=True, check=False
    )
    assert not [line for line in complaints.stdout.splitlines() if line.startswith("tutti")]


def test_recipes_and_projects_are_in_the_wheel(commands: Path, tmp_path: Path) -> None:
    listed = run(commands / "tutti", "list", cwd=tmp_path)
    for path in (REPOSITORY / "recipes").glob("*.yaml"):
        assert path.stem in listed
    run(commands / "tutti", "new", "planets", cwd=tmp_path)
    run(commands / "tutti", "train", "planets.yaml", "-n", "2", "epochs=1", cwd=tmp_path / "planets")


def test_the_commands_train_on_two_ranks(commands: Path, tmp_path: Path) -> None:
    assert "run folder: runs/digits/" in run(commands / "tutti", "train", "digits", "-n", "2", "epochs=1", cwd=tmp_path)
    code = "import horovod.torch as hvd; hvd.init(); print('rank', hvd.rank(), 'of', hvd.size())"
    said = run(commands / "horovodrun", "-np", "2", commands / "python", "-c", code, cwd=tmp_path)
    assert "rank 0 of 2" in said and "rank 1 of 2" in said
