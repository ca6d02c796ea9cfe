"""Bad input: one clear message that names the value, the expectation and the fix, exit code 2, nothing left behind."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from conftest import Finished, Tutti


def assert_refused(done: Finished, *words: str) -> None:
    assert done.code == 2, done.all
    assert done.err.startswith("error: ") or "\nerror: " in done.err
    assert done.err.count("error: ") == 1
    assert "Traceback" not in done.all
    for word in words:
        assert word in done.err, done.err


@pytest.mark.system
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lrr=0.1"], ["unknown key 'optim.lrr'", "Did you mean 'lr'?"]),
        (["epochs=two"], ["epochs='two'", "expected a whole number"]),
        (["model.name=small_cn"], ["model.name='small_cn'", "mlp, small_cnn", "Did you mean 'small_cnn'?"]),
        (["data.name=digit"], ["data.name='digit'", "digits, synthetic, mnist, cifar10", "Did you mean 'digits'?"]),
        (["batch.global=65"], ["batch.global=65", "expected a multiple of 16", "Set batch.global=64"]),
        (["-n", "3"], ["does not split over 3 ranks", "Set batch.global=48"]),
        (["-n", "0"], ["-n 0", "expected 1 or more ranks"]),
        (["model.name=no_such_module:Net"], ["No module named 'no_such_module'"]),
        (["model.name=math:pi"], ["'math:pi' is a float"]),
        (["checkpoint.best=f1"], ["checkpoint.best='f1'", "loss, accuracy"]),
        (["--resume"], ["no run of 'digits' in 'runs' has a checkpoint"]),
        (["--resume", "nowhere"], ["--resume nowhere: no such folder"]),
        (["epochs"], ["override 'epochs'", "expected key=value"]),
        (["schedule.scaling=linear"], ["needs batch.base"]),
        (
            ["optim={name: muon, lr: 0.02, others: {name: sdg, lr: 0.1}}"],
            ["optim.others.name='sdg'", "expected one of sgd, adam, adamw", "Did you mean 'sgd'?"],
        ),
        (
            ["model={name: mlp, hidden: [8]}", "optim={name: muon, lr: 0.02, others: {name: sgd, lr: 0.1}}"],
            ["optim.name='muon' with Mlp", "between its first and its last layer", "leave out optim.others"],
        ),
        (["schedule.warmup_steps=100000"], ["longer than the whole run"]),
        (
            ["data.shuffle=block"],
            ["data.shuffle='block'", "'auto', 'stored', 'keyed' or 'blocks'", "Did you mean 'blocks'?"],
        ),
        (["data.shuffle_window=0"], ["data.shuffle_window=0", "expected a number greater than 0"]),
        (["data.shufle=keyed"], ["unknown key 'data.shufle'", "Did you mean 'shuffle'?"]),
        (["batch.global=1600"], ["larger than the 1437 training samples"]),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(
    tutti: Tutti, tmp_path: Path, words: list[str], message: list[str]
) -> None:
    assert_refused(tutti("train", "digits", *words), *message)
    assert not any(tmp_path.iterdir())


@pytest.mark.system
@pytest.mark.ranks
def test_blocks_of_a_dataset_without_shards_need_a_size(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("train", "digits", "-n", "2", "data.shuffle=blocks")
    assert_refused(done, "'digits' has no shards", "Set data.shuffle_block, for example to 1024 samples.")
    assert not list(tmp_path.rglob("record.json"))


@pytest.mark.system
def test_an_unknown_recipe_offers_the_list(tutti: Tutti) -> None:
    assert_refused(
        tutti("train", "minst"),
        "unknown recipe 'minst'",
        "digits, digits/mlp, hello, imagenet/resnet50",
        "Did you mean 'mnist'?",
    )
    assert_refused(tutti("show", "digits/mpl"), "there is no run 'mpl'", "base, mlp")


@pytest.mark.system
def test_a_users_object_that_does_not_import_shows_its_own_error(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('license server not found')\n")
    done = tutti("train", "digits", "-n", "2", "model.name=broken:Net", PYTHONPATH=str(tmp_path))
    assert_refused(done, "'broken:Net'", "RuntimeError: license server not found")


@pytest.mark.system
def test_a_users_model_that_cannot_be_built_shows_where(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def net(width):\n    return 1 / (width - width)\n")
    done = tutti("train", "digits", "model.name=own:net", "model.width=3", PYTHONPATH=str(tmp_path))
    assert_refused(done, "ZeroDivisionError", "own.py, line 2")
    assert_refused(tutti("train", "digits", "model.name=own:net", PYTHONPATH=str(tmp_path)), "needs the option 'width'")


@pytest.mark.system
@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.ranks)])
def test_missing_and_truncated_data_files(tutti: Tutti, tmp_path: Path, ranks: str) -> None:
    missing = tutti("train", "mnist", "-n", ranks, "data.path=there")
    assert_refused(missing, "train-images-idx3-ubyte[.gz] is not in there", "tutti data get mnist")
    folder = tmp_path / "there"
    folder.mkdir()
    header = bytes((0, 0, 8, 3)) + (60_000).to_bytes(4, "big") + (28).to_bytes(4, "big") * 2
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + bytes(1000)))
    shutil.copy(folder / "train-images-idx3-ubyte.gz", folder / "train-labels-idx1-ubyte.gz")
    truncated = tutti("train", "mnist", "-n", ranks, "data.path=there")
    assert_refused(truncated, "train-images-idx3-ubyte.gz is truncated", "states 47,040,016 bytes, it has 1,016")
    assert not (tmp_path / "runs").exists()


@pytest.mark.system
def test_an_unwritable_run_folder(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused(tutti("train", "digits", "out=file/runs"), "file is not a folder", "out=FOLDER")
    assert_refused(tutti("train", "digits", "-n", "2", "out=/proc/runs"), "/proc cannot be written", "out=FOLDER")
    (tmp_path / "script.py").touch()
    done = tutti("run", "-n", "2", "--out", "/proc/runs", "script.py")
    assert_refused(done, "--out '/proc/runs': /proc cannot be written", "another place with --out FOLDER.")


@pytest.mark.ranks
def test_a_checkpoint_of_another_recipe_or_model(tutti: Tutti, tmp_path: Path) -> None:
    trained = tutti("train", "digits/mlp", "epochs=1", "out=a")
    assert trained.code == 0
    assert "\n1 rank on cpu, " in trained.out and " 22 steps an epoch, 1 epoch, fp32\n" in trained.out
    checkpoint = next(tmp_path.rglob("step-*"))
    done = tutti("train", "hello", "--resume", str(checkpoint))
    assert_refused(done, "is of recipe 'digits/mlp' (model mlp), not of 'hello'", "tutti train digits/mlp --resume")
    done = tutti("train", "digits/mlp", "--resume", str(checkpoint), "model.hidden=[16]", "epochs=2")
    assert_refused(done, "is of another model: layers.1.weight is float32 [128, 64] in it and float32 [16, 64]")
    done = tutti("train", "digits/mlp", "--resume", str(checkpoint), "batch.global=128", "epochs=2")
    assert_refused(done, "was made with global batch 64, this run has 128", "Set batch.global=64")
    again = tutti("train", "digits/mlp", "--resume", str(checkpoint), "epochs=2")
    assert again.code == 0, again.all


@pytest.mark.ranks
def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_offered(tutti: Tutti, tmp_path: Path) -> None:
    assert tutti("train", "digits/mlp", "epochs=2", "checkpoint.every_epochs=1", "checkpoint.best=null").code == 0
    good, bad = sorted(tmp_path.rglob("step-*"))
    data = next(bad.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    done = tutti("train", "digits/mlp", "--resume", "epochs=3")
    assert_refused(done, f"{bad.name} is damaged: {data.name}", f"--resume {good.relative_to(tmp_path)}")
    offered = done.err.rsplit("--resume ", 1)[1].strip()
    assert tutti("train", "digits/mlp", "--resume", offered, "epochs=3").code == 0


CROPS = ("nbody", "data.source=synthetic", "data.box=16", "model.width=4", "model.depth=2", "runtime.device=cpu")
LAYOUTS = {
    "a degree that divides no ranks": (("digits", "-n", "2", "parallel.space=3"), "expected a multiple of 3 ranks"),
    "no part": (
        ("digits", "-n", "2", "parallel.space=0"),
        "parallel.space=0 (command line): expected a number of parts",
    ),
    "negative stages": (("digits", "-n", "2", "parallel.stages=-1"), "parallel.stages=-1 (command line)"),
    "a model that needs the whole sample": (("digits", "-n", "2", "parallel.space=2"), "flatten in features.5 Flatten"),
    "images of odd size": (
        ("digits", "-n", "2", "data.name=synthetic", "data.shape=[1,9,9]", "parallel.space=2"),
        "9 cells do not split into 2 equal parts",
    ),
    "crops too small": (
        (*CROPS, "-n", "4", "data.crop=4", "batch.global=4", "parallel.space=4"),
        "since its parts are too small",
    ),
    "a model without names": (("digits", "-n", "2", "parallel.stages=2"), "expected a model that names its parts"),
    "more stages than layers": (
        (
            *CROPS,
            "-n",
            "4",
            "data.crop=16",
            "batch.global=16",
            "batch.micro=1",
            "parallel.stages=4",
            "parallel.schedule=interleaved",
        ),
        "8 parts with parallel.schedule=interleaved: UNet3d has 4 modules with weights to train",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_that_cannot_be_leaves_nothing_behind(tutti: Tutti, tmp_path: Path, name: str) -> None:
    words, message = LAYOUTS[name]
    assert_refused(tutti("train", *words), message)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.ranks
def test_a_checkpoint_of_another_model_is_refused_in_stages_too(tutti: Tutti, tmp_path: Path) -> None:
    words = ("text", "data.characters=20000", "model.width=32", "model.depth=2", "log.tensorboard=false", "max_steps=2")
    done = tutti("train", *words, "checkpoint.every_steps=2", "schedule.warmup_steps=0")
    assert done.code == 0, done.all
    record = next(tmp_path.rglob("record.json"))
    before = json.loads(record.read_text())
    for layout in ("parallel.stages=2", "parallel.shard=all"):
        done = tutti("train", "text", "-n", "2", "--resume", "latest", layout, "model.width=64", "max_steps=4")
        assert_refused(done, "is of another model: ")
    assert json.loads(record.read_text())["step"] == before["step"]
