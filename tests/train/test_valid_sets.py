"""Several validation sets: measured under their names on any number of ranks, and chosen by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Tutti
from rank_jobs import run_ranks, train
from small_config import small_config

from tutti.config.check import check_best, check_stop, data_paths
from tutti.config.load import change, resolve_values
from tutti.errors import ConfigError

VALUES: dict[str, Any] = {
    "recipe": "sets",
    "data": {"name": "synthetic", "shape": [8], "classes": 4, "train": 64, "valid": 30},
    "valid": {"noisy": {"noise": 8.0}, "few": {"valid": 7}},
    "model": {"name": "mlp", "hidden": [16]},
    "optim": {"name": "adam", "lr": 1e-2},
    "batch": {"global": 16, "eval": 4},
    "epochs": 4,
    "ema": {"decay": 0.5},
    "checkpoint": {"best": "noisy_loss"},
    "stop_early": {"metric": "valid_noisy_accuracy", "patience": 4},
    "log": {"tensorboard": False},
}


def epochs(folder: Path) -> list[dict[str, float]]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [each for each in events if each["event"] in ("start", "epoch")]
    return [{key: value for key, value in each.items() if key.startswith("valid_")} for each in measured]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folders of runs, by their numbers of ranks."""
    folders = {}
    for ranks in (1, 2):
        values = VALUES | {"out": str(tmp_path_factory.mktemp(f"on-{ranks}"))}
        folders[ranks] = run_ranks(ranks, train, values)[0]["folder"]
    return folders


@pytest.mark.ranks
def test_each_set_is_measured_on_any_number_of_ranks(trained: dict[int, Path]) -> None:
    measured = [f"{place}{name}" for place in ("", "noisy_", "few_") for name in ("loss", "accuracy")]
    ours, theirs = epochs(trained[2]), epochs(trained[1])
    assert len(ours) == 5
    for found, wanted in zip(ours, theirs, strict=True):
        assert list(found) == [f"valid_{name}{weights}" for weights in ("", "_ema") for name in measured]
        assert found == pytest.approx(wanted, abs=1e-5)
        assert found["valid_accuracy"] * 30 % 1 == pytest.approx(0, abs=1e-9)
        assert found["valid_few_accuracy"] * 7 == pytest.approx(round(found["valid_few_accuracy"] * 7), abs=1e-9)
    assert ours[-1]["valid_noisy_loss"] > ours[-1]["valid_loss"]


@pytest.mark.ranks
def test_the_best_checkpoint_is_that_of_the_named_set(trained: dict[int, Path]) -> None:
    losses = [each["valid_noisy_loss"] for each in epochs(trained[2])[1:]]
    best = (trained[2] / "checkpoints" / "best").read_text().strip()
    assert best == f"step-{4 * (1 + losses.index(min(losses))):06d}"


@pytest.mark.ranks
def test_a_set_is_evaluated_by_its_name(trained: dict[int, Path], tutti: Tutti) -> None:
    done = tutti("evaluate", str(trained[2]), "--split", "noisy", "--checkpoint", "last", "-n", "2", "--json")
    assert done.code == 0, done.all
    found = json.loads(done.out)["metrics"]
    last = epochs(trained[2])[-1]
    assert found == {name: last[name] for name in ("valid_noisy_loss", "valid_noisy_accuracy")}
    done = tutti("evaluate", str(trained[2]), "--split", "noise")
    assert done.code == 2
    assert "--split noise: expected one of valid, test, train, noisy, few. Did you mean 'noisy'?" in done.all


def test_sets_have_options_of_their_dataset_or_of_another() -> None:
    config = change(small_config(), ["valid={more: {noise: 2.0}, other: {name: mnist, path: elsewhere}}"])
    sets = config.valid_sets()
    assert sets["more"].options() == config.data.options() | {"noise": 2.0}
    assert (sets["other"].name, sets["other"].options()["path"]) == ("mnist", "elsewhere")
    assert data_paths(config) == ["elsewhere"]
    assert change(config, ["valid.more.noise=3.0"]).valid_sets()["more"].options()["noise"] == 3.0


@pytest.mark.parametrize(
    ("valid", "message"),
    [
        ("{more: {nois: 2.0}}", r"^unknown key 'valid\.more\.nois': expected one of .* Did you mean 'noise'\?"),
        ("{more: {noise: many}}", r"^valid\.more\.noise='many': expected a number\."),
        ("{more: {name: minst}}", r"^valid\.more\.name='minst': expected one of .* Did you mean 'mnist'\?"),
        (
            "{more: {workers: 2}}",
            r"^valid .*: more\.workers: expected options of the dataset\. Set",
        ),
        (
            "{valid: {noise: 1.0}}",
            r"^valid .*: the name 'valid': expected letters, digits and",
        ),
        ("{'a b': {noise: 1.0}}", r"^valid .*: the name 'a b': expected letters"),
        ("3", r"^valid=3 .*: expected a group of keys"),
        ("{more: 3}", r"^valid\.more=3 .*: expected a group of keys"),
    ],
)
def test_what_is_wrong_with_a_set_is_named(valid: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change(small_config(), [f"valid={valid}"])


def test_targets_name_metrics_of_sets() -> None:
    config = resolve_values(VALUES)
    check_best(config, config.metrics)
    check_stop(config, config.metrics)
    with pytest.raises(ConfigError, match=r"^checkpoint\.best='nosy_loss': expected one of .*noisy_loss, noisy_acc"):
        check_best(change(config, ["checkpoint.best=nosy_loss"]), config.metrics)
    with pytest.raises(ConfigError, match=r"stop_early\.metric=valid_nosy_loss: .* Did you mean 'valid_noisy_loss'\?"):
        check_stop(change(config, ["stop_early.metric=valid_nosy_loss"]), config.metrics)
