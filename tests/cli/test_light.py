"""What a login node does imports neither torch nor TensorFlow."""

import ast
import json
import sys
from pathlib import Path

import pytest
from conftest import Tutti, command

import tutti as tutti_package

# Of ours that the command imports, and a rank that trains; packages that hold no more than a docstring aside.
MOST_MODULES = 74
OTHERS = ("tutti.doctor", "tutti.bench", "tutti.horovod", "tutti.data.nbody")

PROBE = """
import json, sys
from tutti.cli.main import main
sys.argv = ["tutti", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    code = end.code
heavy = [name for name in ("torch", "tensorflow", "sklearn", "lightning") if name in sys.modules]
print(json.dumps({"code": code, "heavy": heavy}), file=sys.stderr)
"""


@pytest.mark.system
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["list"],
        ["show", "mnist", "optim.lr=3e-4"],
        ["show", "nbody/short_opt"],
        ["show", "imagenet/resnet50"],
        ["show", "digits", "--plot-lr", "lr.png"],
        ["schema", "--out", "recipe.schema.json"],
        ["runs"],
        ["train", "digits", "optim.lrr=1"],
    ],
)
def test_a_login_node_needs_no_torch(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    done = command(sys.executable, "-c", PROBE, *words, cwd=tmp_path)
    found = json.loads(done.err.splitlines()[-1])
    assert found["heavy"] == []
    assert found["code"] == (2 if "optim.lrr=1" in words else 0)


# Loaded by every Python process at its start; each writes which modules of ours it has loaded at its end.
SITE = """
import atexit, json, os, sys

def write():
    own = sorted(name for name in sys.modules if name.partition(".")[0] == "tutti")
    folder, rank = os.environ["MODULES_FOLDER"], os.environ.get("RANK", "command")
    if own:
        with open(os.path.join(folder, f"{rank}-{os.getpid()}.json"), "w") as file:
            json.dump(own, file)

def write_and_exit(code, exit=os._exit):
    write()
    exit(code)

atexit.register(write)
os._exit = write_and_exit
"""


def _with_code(names: list[str]) -> list[str]:
    """The modules without packages that hold no more than their docstring."""
    root = Path(tutti_package.__file__).parent.parent
    empty = {
        str(path.parent.relative_to(root)).replace("/", ".")
        for path in (root / "tutti").rglob("__init__.py")
        if len(ast.parse(path.read_text()).body) < 2
    }
    return [name for name in names if name not in empty]


@pytest.mark.system
def test_training_imports_few_modules(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    found = tmp_path / "found"
    found.mkdir()
    env = {"MODULES_FOLDER": str(found), "PYTHONPATH": str(tmp_path)}
    words = ("-m", "tutti", "train", "digits", "-n", "2", "epochs=1")
    done = command(sys.executable, *words, cwd=tmp_path, **env)
    assert done.code == 0, done.all
    loaded = {path.name.partition("-")[0]: _with_code(json.loads(path.read_text())) for path in found.glob("*.json")}
    assert sorted(loaded) == ["0", "1", "command"]
    for process in loaded:
        assert len(loaded[process]) <= MOST_MODULES, (
            f"{process} imports {len(loaded[process])}: {' '.join(loaded[process])}"
        )
        others = [name for name in loaded[process] if name.startswith(OTHERS)]
        assert others == [], "training imports what it does not need"


@pytest.mark.system
def test_show_tells_where_each_value_came_from(tutti: Tutti) -> None:
    lines = {
        line.split("#")[0].strip(): line.rpartition("#")[2].strip()
        for line in tutti("show", "mnist/large_batch", "optim.lr=3e-4", "-n", "2").out.splitlines()
    }
    assert lines["lr: 0.0003"] == "command line"
    assert lines["global: 8192"] == "recipes/mnist.yaml [large_batch]"
    assert lines["momentum: 0.5"] == "recipes/mnist.yaml [base]"
    assert lines["precision: fp32"] == "default"
    assert any(line.startswith("global batch   8192 = 2 ranks x 4096 (8 x 512)") for line in lines)


@pytest.mark.system
@pytest.mark.parametrize("words", [[], ["optim={name: muon, lr: 0.02, others: {name: adamw, lr: 0.001}}"]], ids=str)
def test_what_show_prints_is_a_recipe(tutti: Tutti, tmp_path: Path, words: list[str]) -> None:
    shown = tutti("show", "digits", *words).out.partition("\non 1 rank")[0]
    (tmp_path / "kept.yaml").write_text(shown)
    again = tutti("show", "kept.yaml").out.partition("\non 1 rank")[0]
    assert [line.split("#")[0] for line in again.splitlines()] == [line.split("#")[0] for line in shown.splitlines()]


@pytest.mark.system
def test_list_names_every_recipe_and_part(tutti: Tutti) -> None:
    out = tutti("list").out
    recipes = ("digits", "mnist/large_batch", "cifar10/resnet_small", "imagenet/resnet50_shift", "nbody/bs512_opt")
    named = ("mnist_torch", "unet3d", "synthetic", "images", "adamw", "cosine", "top5", "cross_entropy", "l1")
    for name in (*recipes, *named):
        assert any(line.split()[:1] == [name] and len(line.split()) > 2 for line in out.splitlines()), name


@pytest.mark.system
def test_the_learning_rate_is_drawn(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("show", "mnist", "-n", "8", "--plot-lr", "lr.png")
    assert done.code == 0, done.all
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
