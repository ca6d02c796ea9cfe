"""`tutti advise` from studies, sweeps and noise scales."""

import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import Call, command
from study_folders import Made, scale_study, sweep_study

from tutti.config.load import resolve
from tutti.study.definition import Goal, Point, PointState

NOISE, FIRST, EPOCHS = 512.0, 4.0, 40
GOAL = Goal("full", metric="valid_accuracy", target=0.95)
CHOICES = ("cheapest", "knee", "fastest")


def make_study(path: str, per_node: int = 2, ranks: tuple[int, ...] = (1, 2, 4, 8), device: str = "cpu") -> str:
    """A study of ranks whose nodes have two ranks; digits has 1,437 training samples."""
    folder = scale_study(
        Path(path), lambda point: Made(100.0 * point.ranks * 0.98 ** math.log2(point.ranks)), ranks=ranks
    )
    for record in folder.points.glob("*/record.json"):
        content = json.loads(record.read_text())
        content["segments"][0] |= {"hosts": [f"n{rank // per_node}" for rank in range(content["ranks"])]}
        content["segments"][0] |= {"device": device}
        record.write_text(json.dumps(content))
    return str(folder.path)


def make_sweep(path: str, key: str = "batch.global", goal: Goal = GOAL) -> str:
    """A sweep over batches in which epochs follow the law."""

    def made(point: Point) -> Made:
        batch = point.values.get("batch.global", 64)
        needed = round(FIRST * (1 + batch / NOISE))
        epochs = [{"train_loss": 1.0, "valid_accuracy": 0.96 if each >= needed else 0.9} for each in range(1, EPOCHS)]
        return Made(per_rank_batch=batch // 2, epochs=epochs, windows=EPOCHS, every_steps=1)

    values = [64, 128, 256, 512, 1024] if key == "batch.global" else [0.1, 0.2]
    return str(sweep_study(Path(path), made, {key: values}, goal=goal).path)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_tutti: Call) -> Call:
    """The command in this process, in a folder with a study and a sweep."""
    monkeypatch.chdir(tmp_path)
    make_study("study")
    make_sweep("sweep")

    return partial(call_tutti, "advise")


def test_a_study_and_a_sweep_give_three_choices_and_some_sentences(call: Call) -> None:
    code, out, _ = call("study", "--sweep", "sweep", "--fabric", "hpc")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["choice", "nodes", "ranks"]
    assert "node-hours" in lines[0]
    assert tuple(line.split()[0] for line in lines[1:4]) == CHOICES
    assert 3 <= len(lines[4:]) <= 8
    assert "Epochs are those to valid_accuracy=0.95, measured at batches of 64, 128, 256, 512, 1,024" in out
    assert "The batch of a rank stays at 32" in out
    assert "Note: the sweep trained mnist, and the study digits." in out
    assert "check it with tutti sweep digits" in out


def test_json_holds_every_choice_with_its_intervals_and_reasons(call: Call) -> None:
    code, out, _ = call("study", "--sweep", "sweep", "--fabric", "hpc", "--json")
    assert code == 0
    found = json.loads(out)
    assert [each["choice"] for each in found["choices"]] == list(CHOICES)
    for each in found["choices"]:
        for name in ("hours", "node_hours", "epochs", "samples_per_second"):
            low, high = each[f"{name}90"]
            assert low < each[name] < high
        assert each["node_hours"] == pytest.approx(each["hours"] * each["nodes"])
        assert each["throughput_from"] == ("study" if each["global_batch"] == 32 * each["ranks"] else "sweep")
        assert each["lr_band"] == pytest.approx([each["lr"] / 2, each["lr"] * 2])
        assert each["reasons"]
    low, high = found["critical_batch90"]
    assert low < NOISE < high
    assert (found["epochs_from"], found["target"], found["unmet"]) == ("sweep", {"valid_accuracy": 0.95}, None)
    assert all(each["after"] < each["before"] for each in found["next"])


def test_without_a_sweep_it_says_that_epochs_are_not_known(call: Call) -> None:
    code, out, _ = call("study", "--fabric", "hpc")
    assert code == 0
    assert "hardware numbers only" in out
    assert "larger than any in the study" in out
    assert "Measure next: the noise scale in" in out


def test_another_target_than_that_of_the_sweep(call: Call) -> None:
    easy = json.loads(call("study", "--sweep", "sweep", "--target", "valid_accuracy=0.8", "--json")[1])
    assert easy["choices"][0]["epochs"] == pytest.approx(1, abs=0.3)
    assert easy["target"] == {"valid_accuracy": 0.8}


def test_limits_that_nothing_keeps_name_the_closest_choice(call: Call) -> None:
    words = ("study", "--sweep", "sweep", "--fabric", "hpc")
    code, out, _ = call(*words, "--budget", "0.0001", "--deadline", "1min")
    assert code == 0
    assert "Nothing keeps these limits. The closest is" in out
    assert "above the budget of 0.0001" in out
    kept = json.loads(call(*words, "--deadline", "1d", "--budget", "10", "--json")[1])
    assert kept["unmet"] is None
    assert all("within the deadline with a probability of 100%" in each["reasons"] for each in kept["choices"])


def test_gpu_hours_count_ranks(call: Call) -> None:
    make_study("gpus", device="cuda:0")
    found = json.loads(call("gpus", "--sweep", "sweep", "--unit", "gpu-hours", "--json")[1])
    for each in found["choices"]:
        assert each["gpu_hours"] == pytest.approx(each["hours"] * each["ranks"])


def test_a_recipe_is_written_with_the_line_that_starts_it(call: Call) -> None:
    content = json.loads(Path("study/study.json").read_text())
    Path("study/study.json").write_text(json.dumps(content | {"on": "perlmutter"}))
    words = ("study", "--sweep", "sweep", "--fabric", "hpc", "--write", "large.yaml")
    code, out, _ = call(*words)
    assert code == 0
    found = json.loads(call(*words[:-2], "--json")[1])
    for choice in found["choices"]:
        config = resolve(f"large.yaml/{choice['choice']}").config
        assert config.batch.global_batch == choice["global_batch"]
        assert config.optim.lr == pytest.approx(choice["lr"], rel=0.01)
        assert config.epochs == choice["planned_epochs"] >= choice["epochs"]
        assert config.schedule.warmup_epochs == choice["warmup_epochs"]
        assert config.stop_at == {"valid_accuracy": 0.95}
        assert config.model.name == "small_cnn"
        assert f"--on perlmutter --nodes {choice['nodes']} --ranks-per-node 2 --time" in out
    assert resolve("large.yaml").config.optim == resolve("large.yaml/knee").config.optim
    before = Path("large.yaml").read_text()
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert "--write large.yaml: the file exists" in err
    assert Path("large.yaml").read_text() == before


def test_a_recipe_in_a_file_is_extended_from_where_the_new_one_is(call: Call) -> None:
    Path("recipes").mkdir()
    Path("recipes/own.yaml").write_text("small: {extends: digits, model: {width: 8}}\n")
    content = json.loads(Path("study/study.json").read_text()) | {"recipe": "recipes/own.yaml/small"}
    Path("study/study.json").write_text(json.dumps(content))
    Path("advice").mkdir()
    code, _, err = call("study", "--sweep", "sweep", "--write", "advice/new.yaml")
    assert (code, err) == (0, "")
    assert "extends: ../recipes/own.yaml/small" in Path("advice/new.yaml").read_text()
    assert resolve("advice/new.yaml").config.plain()["model"]["width"] == 8


def test_overrides_of_the_study_are_part_of_the_recipe(call: Call) -> None:
    content = json.loads(Path("study/study.json").read_text())
    content["overrides"] = ["model.width=16", "batch.global=64", "batch.micro=8"]
    Path("study/study.json").write_text(json.dumps(content))
    code, out, _ = call("study", "--sweep", "sweep", "--write", "own.yaml", "--json")
    assert code == 0
    assert "cheapest:   tutti train own.yaml/cheapest -n 2" in json.loads(out)["written"]
    plain = resolve("own.yaml").config.plain()
    assert plain["model"]["width"] == 16
    assert plain["batch"]["global"] != 64
    assert plain["batch"]["micro"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], ["nowhere holds no study"]),
        (["sweep"], ["study of tutti sweep: expected one of tutti scale"]),
        (["failed"], ["failed has no finished run", "out of memory"]),
        (["study", "--unit", "nodehours"], ["--unit nodehours: expected node-hours or gpu-hours", "Did you mean"]),
        (["study", "--unit", "gpu-hours"], ["the study ran on CPUs"]),
        (["study", "--budget", "0"], ["--budget 0: expected a number above 0"]),
        (["study", "--budget", "nan"], ["--budget nan"]),
        (["study", "--deadline", "24"], ["--deadline 24: expected a time above 0 with its unit", "24h"]),
        (["study", "--deadline", "24x"], ["--deadline 24x"]),
        (["study", "--fabric", "tpc"], ["--fabric tpc", "Did you mean 'tcp'"]),
        (["study", "--efficiency", "180%"], ["--efficiency 180%"]),
        (["study", "--ranks-per-node", "0"], ["--ranks-per-node 0"]),
        (["study", "--most-nodes", "0"], ["--most-nodes 0"]),
        (["study", "--target", "valid_accuracy=0.9"], ["expected --sweep STUDY"]),
        (["study", "--sweep", "nowhere"], ["nowhere holds no study"]),
        (["study", "--sweep", "rates"], ["every run has a global batch of 64: expected several batches"]),
        (["study", "--sweep", "waiting"], ["--sweep waiting has no finished run"]),
        (["study", "--sweep", "aimless"], ["no target", "All runs that train reach --target valid_accuracy=0.96"]),
        (["study", "--sweep", "sweep", "--target", "valid_acuracy=0.9"], ["no 'valid_acuracy'", "Did you mean"]),
        (["study", "--sweep", "sweep", "--target", "valid_accuracy"], ["expected METRIC=NUMBER"]),
        (["study", "--sweep", "sweep", "--target", "valid_accuracy=0.99"], ["no run reaches valid_accuracy=0.99"]),
        (["study", "--write", "advice"], ["expected the name of a YAML file"]),
        (["study", "--write", "nowhere/advice.yaml"], ["cannot be written"]),
    ],
)
def test_bad_input_is_named_with_its_fix(call: Call, words: list[str], message: list[str]) -> None:
    if "failed" in words:
        out_of_memory = PointState("failed", reason="out of memory", attempts=1)
        scale_study(Path("failed"), lambda point: Made(state=out_of_memory))
    if "rates" in words:
        make_sweep("rates", "optim.lr")
    if "waiting" in words:
        sweep_study(Path("waiting"), lambda point: None, {"batch.global": [64, 128]}, goal=GOAL)
    if "aimless" in words:
        make_sweep("aimless", goal=Goal("full"))
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    for each in message:
        assert each in err


@pytest.mark.system
def test_advice_imports_nothing_heavy(tmp_path: Path) -> None:
    study, sweep = make_study(str(tmp_path / "study")), make_sweep(str(tmp_path / "sweep"))
    words = ("advise", study, "--sweep", sweep, "--fabric", "hpc", "--json")
    done = command(sys.executable, "-X", "importtime", "-m", "tutti", *words, cwd=tmp_path)
    assert done.code == 0, done.all
    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
    assert "tutti.forecast.epochs" in imported
    assert not imported & {"torch", "tensorflow", "scipy", "matplotlib", "pandas"}


def make_noise(path: str, value: float, steps: int = 60) -> str:
    """A run folder with the events of a noise scale."""
    Path(path).mkdir()
    events = [
        {
            "event": "noise",
            "step": 10 * place,
            "epoch": 1,
            "gradient_square": 1.0 + 0.1 * (place % 3),
            "gradient_variance": 1.1 * value,
            "batch": 64,
        }
        for place in range(1, steps + 1)
    ]
    (Path(path) / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_a_noise_scale_gives_the_critical_batch(call: Call) -> None:
    words = ("study", "--noise", make_noise("noisy", 256), "--fabric", "hpc")
    code, out, _ = call(*words)
    assert code == 0
    assert "from a measured noise scale of 256 at a batch of 64; the recipe" in out
    assert "the recipe's 20 epochs at a batch of 64 are taken to reach what you want" in out
    found = json.loads(call(*words, "--json")[1])
    assert found["epochs_from"] == "noise scale"
    assert found["critical_batch"] == pytest.approx(256, rel=0.2)
    low, high = found["critical_batch90"]
    assert 5 < high / low < 20  # a factor of two for each deviation
    assert [each["choice"] for each in found["choices"]] == list(CHOICES)
    knee = found["choices"][1]
    assert knee["global_batch"] == pytest.approx(256, rel=0.6)
    both = json.loads(call(*words, "--sweep", "sweep", "--json")[1])
    assert both["epochs_from"] == "sweep"


def test_a_run_without_a_noise_scale_is_refused(call: Call) -> None:
    for name in ("nowhere", make_noise("none", 256, 0), make_noise("short", 256, 3)):
        code, out, err = call("study", "--noise", name)
        assert (code, out) == (2, "")
        assert f"--noise {name}: the run has no noise scale" in err
        assert "log.noise_scale=true" in err
