"""The order that a recipe names is the order of the run, on any number of ranks, after a resume, and for old runs."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Tutti
from rank_jobs import read_ledger, run_ranks, train

from tutti.config.load import resolve_values
from tutti.config.plan import make_plan
from tutti.data.order import make_order, permutation

pytestmark = pytest.mark.ranks

VALUES: dict[str, Any] = {
    "recipe": "orders",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [8]},
    "optim": {"name": "sgd", "lr": 0.1},
    "batch": {"global": 64, "micro": 16},
    "epochs": 2,
    "checkpoint": {"every_steps": 10, "every_epochs": None},
    "log": {"every_steps": 10, "ledger": True, "tensorboard": False},
}
STEPS = 44
BLOCKS = {"shuffle": "blocks", "shuffle_block": 100, "shuffle_window": 3}


def named(name: str | dict[str, Any], out: Path) -> dict[str, Any]:
    options = {"shuffle": name} if isinstance(name, str) else name
    return VALUES | {"data": {"name": "digits"} | options, "out": str(out)}


def expected(values: dict[str, Any]) -> dict[int, list[int]]:
    """The samples of every step as the order of these values gives them."""
    config = resolve_values(values)
    order = make_order(config, make_plan(config, 1, 1437), None)
    return {step + 1: order.global_ids(step).tolist() for step in range(STEPS)}


def killed(ranks: int, values: dict[str, Any]) -> Path:
    """A run that died in its second epoch; its newest checkpoint."""
    run_ranks(ranks, train, values, None, 33, expect_failure=True)
    return next(Path(values["out"]).glob("orders/*/checkpoints/step-000030"))


def in_first_form(checkpoint: Path) -> None:
    """Write a manifest as the first versions wrote it: without the name of an order."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    assert content.pop("order") == "stored"
    del content["sum"]
    path.write_text(json.dumps(content | {"sum": zlib.crc32(json.dumps(content).encode())}))


@pytest.mark.parametrize("name", ["keyed", BLOCKS])
def test_a_named_order_is_kept_over_ranks_and_resumes(tmp_path: Path, name: str | dict[str, Any]) -> None:
    values = named(name, tmp_path)
    resumed = run_ranks(1, train, values, str(killed(2, values)))[0]["folder"]
    assert read_ledger(resumed) == expected(values)
    assert read_ledger(resumed)[1] != permutation(1437, 42, 0)[:64].tolist()


def test_a_run_that_names_no_order_continues_as_it_began(tmp_path: Path) -> None:
    """Here with the order that a larger dataset would have had."""
    checkpoint = killed(1, named("keyed", tmp_path))
    resumed = run_ranks(2, train, named("auto", tmp_path), str(checkpoint))[0]["folder"]
    assert read_ledger(resumed) == expected(named("keyed", tmp_path))


def test_another_order_is_refused(tmp_path: Path) -> None:
    checkpoint = killed(1, named("keyed", tmp_path))
    found = run_ranks(2, train, named("stored", tmp_path), str(checkpoint), expect_failure=True)
    for error in found:
        assert "was made with sample order keyed, this run has stored" in str(error)
        assert "Set data.shuffle as in its run." in str(error)


def test_a_run_of_the_first_versions_continues_with_its_order(tutti: Tutti, tmp_path: Path) -> None:
    """Neither its config.yaml nor the manifests of its checkpoints know of orders."""
    words = ("log.ledger=true", "batch.micro=16", "checkpoint.every_steps=30", "max_steps=30")
    began = tutti("train", "digits/mlp", "-n", "2", "epochs=2", *words)
    assert began.code == 0, began.all
    [folder] = (tmp_path / "runs" / "digits" / "mlp").iterdir()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for key in ("shuffle", "shuffle_block", "shuffle_window"):
        del config["data"][key]
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    in_first_form(folder / "checkpoints" / "step-000030")
    done = tutti("train", str(folder), "max_steps=null")
    assert done.code == 0, done.all
    orders = [permutation(1437, config["seed"], epoch) for epoch in range(2)]
    steps = {
        22 * epoch + step + 1: orders[epoch][64 * step : 64 * step + 64].tolist()
        for epoch in range(2)
        for step in range(22)
    }
    assert read_ledger(folder) == steps
