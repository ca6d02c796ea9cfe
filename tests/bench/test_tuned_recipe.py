"""The tuned recipe extends the original, loads from where it is, and is never written over another file."""

from pathlib import Path

import pytest
from made_up import made_up

from tutti.bench.greedy_search import GreedySearch
from tutti.bench.tune import FIRST_LINE, check_target, extends, write_recipe
from tutti.config.load import resolve
from tutti.errors import ConfigError

CONDITIONS = {"ranks": "1 on here", "versions": "torch 2.11"}


def tuned_search() -> GreedySearch:
    """A search that has kept data.workers=4."""
    search = GreedySearch(made_up(data=0.9, computing=0.1, batches_are_samples=True, cores=2))
    chosen = search.next()
    assert chosen is not None
    search.note(chosen, made_up("data.workers=4", computing=0.1, batches_are_samples=True, cores=2))
    return search


def test_it_extends_a_named_recipe(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    write_recipe(path, "digits/mlp", ("epochs=3", "optim.lr=1e-05"), tuned_search(), CONDITIONS)
    assert path.read_text() == (
        "# Made by tutti tune from digits/mlp: 32 -> 320 samples/s, 10.00 times as fast.\n"
        "#   ranks: 1 on here\n"
        "#   versions: torch 2.11\n"
        "\n"
        "extends: digits/mlp\n"
        "# given on the command line\n"
        "epochs: 3\n"
        "optim:\n"
        "  # given on the command line\n"
        "  lr: 1.0e-05\n"
        "data:\n"
        "  # 10.00 times as fast (32 -> 320 samples/s): 4 loader processes on each rank load batches during the step\n"
        "  workers: 4\n"
    )
    tuned, original = resolve(str(path)).config, resolve("digits/mlp").config
    assert (tuned.data.workers, tuned.epochs, tuned.optim.lr, tuned.recipe) == (4, 3, 1e-5, "tuned")
    assert tuned.model == original.model


def test_it_extends_a_file_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "my.yaml").write_text("fast: {extends: digits, epochs: 7}\n")
    monkeypatch.chdir(tmp_path)
    assert extends("mine/my.yaml/fast", tmp_path / "out" / "deep") == "../../mine/my.yaml/fast"
    assert extends("mine/my.yaml/fast", Path("mine")) == "my.yaml/fast"
    path = tmp_path / "out" / "deep" / "tuned.yaml"
    write_recipe(path, "mine/my.yaml/fast", (), tuned_search(), CONDITIONS)
    monkeypatch.chdir("/")
    assert resolve(str(path)).config.epochs == 7
    assert resolve(str(path)).config.data.workers == 4


@pytest.mark.parametrize(
    "override",
    [
        "data.name=digits",
        "model.hidden=[8, 4]",
        "data={shift: 2}",
        "out=a b",
        "batch.per_rank=8",
        "checkpoint.best=null",
    ],
)
def test_what_was_given_loads_as_it_was_given(override: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    write_recipe(path, "digits/mlp", (override,), tuned_search(), CONDITIONS)
    expected = resolve("digits/mlp", [override, "data.workers=4", "recipe=tuned"]).config
    assert resolve(str(path)).config == expected


def test_a_search_that_kept_no_change_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    write_recipe(path, "digits", (), GreedySearch(made_up(computing=1.0)), CONDITIONS)
    assert "# Nothing that was tried helped beyond the noise.\n" in path.read_text()
    assert resolve(str(path)).config == resolve("digits", ["recipe=tuned"]).config


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\n")
    with pytest.raises(ConfigError, match="a file that tutti tune did not write is there"):
        check_target(path, "digits")
    path.write_text(f"{FIRST_LINE} from digits\nextends: digits\n")
    check_target(path, "digits")


def test_a_recipe_is_not_made_to_extend_itself(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    path.write_text(f"{FIRST_LINE}\nextends: digits\n")
    with pytest.raises(ConfigError, match="it would extend itself"):
        check_target(path, str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tuned.txt", "expected a name that ends in .yaml"),
        ("missing/tuned.yaml", "is not a folder that can be written"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_target(tmp_path / name, "digits")
