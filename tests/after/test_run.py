"""A run after training: opened, evaluated, exported and used without tutti."""

import json
import sys
from pathlib import Path
from typing import Any

import after_work
import pytest
import torch
from conftest import Call, command
from rank_jobs import run_ranks, train

import tutti
from tutti.after.run import SUFFIXES, export
from tutti.errors import CheckpointError, ConfigError, FolderError
from tutti.runs.metrics import read_events

pytestmark = pytest.mark.ranks

# A process in which tutti cannot be imported: the network, a file with its weights, and a file for the outputs.
WITHOUT_TUTTI = """
import sys
sys.modules["tutti"] = None
sys.path.insert(0, sys.argv[1])
import torch
from after_work import Net, images
for name in sys.argv[2:]:
    if name.endswith(".safetensors"):
        from safetensors.torch import load_file
        weights = load_file(name)
    else:
        weights = torch.load(name, weights_only=True)
    net = Net(8)
    net.load_state_dict(weights)
    with torch.no_grad():
        torch.save(net.eval()(images()), name + ".outputs")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks, over which its weights were sharded."""
    values = after_work.VALUES | {"out": str(tmp_path_factory.mktemp("runs")), "parallel": {"shard": "all"}}
    return run_ranks(2, train, values)[0]["folder"]


def rows(folder: Path, event: str) -> list[dict[str, Any]]:
    return [row for row in read_events(folder / "metrics.jsonl") if row["event"] == event]


def test_a_run_is_opened(folder: Path) -> None:
    run = tutti.open_run(folder)
    assert run.config.model.name == "after_work:Net"
    assert len(run.metrics) == len((folder / "metrics.jsonl").read_text().splitlines())
    assert run.results == {
        key: rows(folder, "epoch")[-1][key] for key in ("train_loss", "valid_loss", "valid_accuracy")
    }
    assert [(each.name, each.step, each.epoch) for each in run.checkpoints] == [
        ("step-000022", 22, 1),
        ("step-000044", 44, 2),
    ]
    assert [each.is_last for each in run.checkpoints] == [False, True]
    assert sum(each.is_best for each in run.checkpoints) == 1
    assert repr(run) == f"<run {folder}: finished>"


def test_the_model_of_a_sharded_run_is_whole(folder: Path) -> None:
    from tutti.data.builtin import digits

    net = tutti.open_run(folder).model("last")
    assert isinstance(net, after_work.Net) and not net.training
    data = digits("valid")
    inputs, targets = data.batch(torch.arange(len(data)), None)
    with torch.no_grad():
        right = (net(inputs).argmax(1) == targets).double().mean().item()
    assert right == rows(folder, "epoch")[-1]["valid_accuracy"]
    first = tutti.open_run(folder).model(22).state_dict()
    assert not torch.equal(first["head.1.weight"], net.state_dict()["head.1.weight"])


def test_weights_go_into_a_module_of_the_same_shape_alone(folder: Path) -> None:
    run, own = tutti.open_run(folder), after_work.Net(8)
    assert run.model(into=own) is own
    with pytest.raises(CheckpointError, match=r"backbone.0.weight is float32 \[8, 1, 3, 3\] in it and float32 \[4, 1"):
        run.model(into=after_work.Net(4))
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module"):
        run.model(into=3)


def test_evaluation_on_the_ranks_of_the_run_gives_its_own_figures(folder: Path) -> None:
    told = (folder / "metrics.jsonl").read_bytes()
    files = sorted(folder.rglob("*"))
    recorded = {row["step"]: row for row in rows(folder, "epoch")}
    best = next(each.step for each in tutti.open_run(folder).checkpoints if each.is_best)
    for found in run_ranks(2, after_work.evaluate, folder):
        assert found == {name: recorded[best][name] for name in ("valid_loss", "valid_accuracy")}
    [alone] = run_ranks(1, after_work.evaluate, folder, "valid", "22")
    assert alone == pytest.approx({name: recorded[22][name] for name in alone}, rel=1e-6)
    assert (folder / "metrics.jsonl").read_bytes() == told and sorted(folder.rglob("*")) == files


def test_an_exported_model_has_the_same_outputs_without_tutti(folder: Path, tmp_path: Path) -> None:
    run, files = tutti.open_run(folder), [tmp_path / "model.pt", tmp_path / "model.safetensors"]
    for kind, file in zip(("torch", "safetensors"), files, strict=True):
        export(run, kind, file, "best", force=False)
    words = (sys.executable, "-c", WITHOUT_TUTTI, str(Path(after_work.__file__).parent), *map(str, files))
    done = command(*words, cwd=tmp_path)
    assert done.code == 0, done.all
    with torch.no_grad():
        expected = run.model()(after_work.images())
    for file in files:
        assert torch.equal(torch.load(f"{file}.outputs"), expected), file.name
    about = json.loads((tmp_path / "model.pt.json").read_text())
    assert about["model"] == {"name": "after_work:Net", "width": 8}
    assert about["data"] == {"input_shape": [1, 8, 8], "num_classes": 10}
    assert about["step"] == run.checkpoint().manifest.step


def test_an_onnx_graph_has_the_same_outputs_to_rounding(folder: Path, tmp_path: Path) -> None:
    import onnxruntime

    run = tutti.open_run(folder)
    path, _ = export(run, "onnx", tmp_path / "model.onnx", "best", force=False)
    [found] = onnxruntime.InferenceSession(path).run(None, {"inputs": after_work.images().numpy()})
    with torch.no_grad():
        expected = run.model()(after_work.images()).numpy()
    assert abs(found - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "package", "said"),
    [
        ("safetensors", "safetensors.torch", r"--to safetensors needs safetensors. .*'tutti-train\[safetensors\]'"),
        ("onnx", "onnxscript", r"--to onnx needs onnx and onnxscript. .*'tutti-train\[onnx\]'"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=said):
        export(tutti.open_run(folder), kind, tmp_path / f"model.{kind}", "best", force=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_kept(folder: Path, tmp_path: Path) -> None:
    run, path = tutti.open_run(folder), tmp_path / "model.pt"
    path.write_text("mine")
    with pytest.raises(FolderError, match=r"model.pt exists: expected a new file"):
        export(run, "torch", path, "best", force=False)
    assert path.read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"]
    export(run, "torch", path, "best", force=True)
    assert torch.load(path, weights_only=True).keys() == run.weights().keys()


@pytest.mark.parametrize("kind", ["torch", "safetensors", "onnx"])
def test_a_file_that_cannot_be_written_is_named(folder: Path, kind: str) -> None:
    path = Path("/proc") / f"model{SUFFIXES[kind]}"
    with pytest.raises(FolderError, match=rf"^{path} cannot be written: "):
        export(tutti.open_run(folder), kind, path, "best", force=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "--to", "torchh"], "--to torchh: expected one of safetensors, torch, onnx"),
        (["export", "--to", "keras"], "the run has framework=torch, which has the formats safetensors, torch, onnx."),
        (["export", "--to", "torch", "--out", "model.onnx"], "expected a file that ends in .pt for --to torch"),
        (["export", "--to", "torch", "--out", "no/model.pt"], "there is no folder no"),
        (["export", "--to", "torch", "--out", "/proc/m.pt"], "/proc/m.pt cannot be written: No such file or directory"),
        (["export", "--to", "safetensors", "--out", "/proc/m.safetensors"], "m.safetensors cannot be written: No such"),
        (["export", "--to", "onnx", "--out", "/proc/m.onnx"], "m.onnx cannot be written: No such file or directory"),
        (["export", "--to", "torch", "--checkpoint", "21"], "expected best, last or the step of a saved one (22, 44)"),
        (["export", "--to", "torch", "--ema"], "has no averaged weights: expected a run with ema. Leave --ema out."),
        (["evaluate", "--split", "test"], "data.name=digits has the splits train and valid"),
        (["evaluate", "--split", "all"], "--split all: expected one of valid, test, train"),
        (["evaluate", "--data", "x"], "--data x: data.name=digits reads no files of this split"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_request_is_refused(folder: Path, call_tutti: Call, words: list[str], said: str) -> None:
    code, _, err = call_tutti(words[0], str(folder), *words[1:])
    assert code == 2 and said in err


TEXT: dict[str, Any] = {
    "data": {"name": "text", "characters": 20_000, "context": 32},
    "model": {"name": "gpt", "width": 32, "depth": 2, "heads": 2},
    "batch": {"global": 16, "micro": 4},
}
VOLUMES: dict[str, Any] = {
    "data": {"name": "nbody", "source": "synthetic", "crop": 16, "box": 24, "train_samples": 16, "valid_samples": 8},
    "model": {"name": "unet3d", "width": 4, "depth": 2},
    "loss": {"name": "l1"},
    "metrics": [],
    "batch": {"global": 4},
}
LAYOUTS = {
    "shards": (4, {"shard": "all"}, {}),
    "stages": (2, {"stages": 2}, TEXT),
    "tensor": (2, {"tensor": 2}, TEXT),
    "space": (2, {"space": 2}, VOLUMES),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_leaves_a_whole_model(layout: str, tmp_path: Path) -> None:
    """The model on one rank gives the figures of the run, and a run of the same layout begins with its weights."""
    ranks, parallel, more = LAYOUTS[layout]
    values = after_work.VALUES | {"epochs": 1, "checkpoint": {"every_steps": 4}, "parallel": parallel} | more
    folder = run_ranks(ranks, train, values | {"out": str(tmp_path / "run")})[0]["folder"]
    own = run_ranks(ranks, after_work.evaluate, folder, "valid", "last")[0]
    [last] = rows(folder, "epoch")
    assert own == {name: last[name] for name in own}
    [alone] = run_ranks(1, after_work.evaluate, folder, "valid", "last")
    assert alone == pytest.approx(own, rel=1e-5)
    again = values | {"init": {"from": str(folder), "checkpoint": "last"}, "out": str(tmp_path / "again")}
    [start] = rows(run_ranks(ranks, train, again | {"max_steps": 1})[0]["folder"], "start")
    assert start["valid_loss"] == pytest.approx(own["valid_loss"], rel=1e-5)
    assert tutti.open_run(folder).model("last").state_dict().keys() == tutti.open_run(folder).weights("last").keys()
