"""The built-in recipes, and the ways of naming a recipe."""

import re
from pathlib import Path

import pytest
import yaml

from tutti.config.load import load, resolve
from tutti.config.plan import make_plan
from tutti.config.recipes import BUILT_IN, built_in, expand, find, parse_yaml
from tutti.errors import ConfigError

NAMES = [name for name, _ in built_in()]
SAMPLES = {"cifar10": 50_000, "images": 1_281_167}  # of the real data, where a recipe's files say how many there are


def test_every_run_of_every_built_in_file_is_listed_with_a_line_of_its_own() -> None:
    runs = [
        path.stem if run == "base" else f"{path.stem}/{run}"
        for path in sorted(BUILT_IN.glob("*.yaml"))
        for run in yaml.safe_load(path.read_text())
    ]
    assert runs == NAMES
    assert {"digits", "hello", "mnist", "cifar10/fast", "imagenet/resnet50", "nbody"} <= set(NAMES)
    summaries = [summary for _, summary in built_in()]
    assert all(summaries) and len(set(summaries)) == len(summaries)


@pytest.mark.parametrize("name", NAMES)
def test_every_built_in_recipe_resolves_and_splits_over_ranks(name: str) -> None:
    resolved = resolve(name)
    assert resolved.config.recipe == name
    for ranks in (1, 2, 4):
        samples = resolved.config.data.train_samples() or SAMPLES[resolved.config.data.name]
        assert make_plan(resolved.config, ranks, samples).total_steps > 0


@pytest.mark.parametrize("name", NAMES)
def test_no_built_in_recipe_names_ranks_or_a_machine(name: str) -> None:
    config = resolve(name).config
    assert (config.runtime.device, config.runtime.threads, config.out) == ("auto", None, "runs")


@pytest.mark.parametrize(
    ("recipe", "option", "place"),
    [
        ("mnist", "path", "mnist"),
        ("cifar10/cnn", "path", "cifar10"),
        ("cifar10/fast", "path", "cifar10"),
        ("imagenet/resnet50", "path", "imagenet"),
        ("nbody", "train", "nbody/train.h5"),
        ("nbody", "valid", "nbody/valid.h5"),
    ],
)
def test_the_path_of_data_comes_from_the_environment(
    recipe: str, option: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TUTTI_DATA", raising=False)
    assert resolve(recipe).config.data.options()[option] == f"data/{place}"
    monkeypatch.setenv("TUTTI_DATA", "/big disk")
    assert resolve(recipe).config.data.options()[option] == f"/big disk/{place}"


@pytest.mark.parametrize(
    ("recipe", "file", "run"),
    [
        ("mnist", BUILT_IN / "mnist.yaml", "base"),
        ("mnist/", BUILT_IN / "mnist.yaml", "base"),
        ("mnist/keras", BUILT_IN / "mnist.yaml", "keras"),
        ("my.yaml", Path("my.yaml"), "base"),
        ("./my.yaml", Path("my.yaml"), "base"),
        ("my.yaml/run", Path("my.yaml"), "run"),
        ("below/my.yml", Path("below/my.yml"), "base"),
        ("below/my.yml/run", Path("below/my.yml"), "run"),
        ("mnist.yaml/run", Path("mnist.yaml"), "run"),
    ],
)
def test_a_recipe_is_found_by_name_or_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, file: Path, run: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("below").mkdir()
    for path in ("my.yaml", "below/my.yml", "mnist.yaml"):
        Path(path).touch()
    assert find(recipe) == (file, run)


@pytest.mark.parametrize("recipe", ["", "no_such/mnist", "mnist keras", "my"])
def test_what_is_neither_name_nor_path_is_refused_with_the_names(recipe: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown recipe {recipe!r}: expected one of {', '.join(NAMES)}")):
        find(recipe)


@pytest.mark.parametrize("recipe", ["../recipes/mnist", "./mnist", "/no/such/run", "runs/digits/2026-11-15_101500_n2"])
def test_a_path_that_is_not_there_is_refused_without_the_names(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    missing = re.escape(f"{recipe!r}: there is no such file or folder in {tmp_path / 'here'}. ")
    with pytest.raises(ConfigError, match=f"^{missing}.*tutti list and tutti runs print them"):
        find(recipe)


def test_a_path_without_its_suffix_suggests_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").touch()
    with pytest.raises(ConfigError, match=r"Did you mean './mine\.yaml'\?$"):
        find("./mine")


def test_a_folder_with_the_name_of_a_recipe_is_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"recipe 'my\.yaml': no such file in .*Give the path of a YAML file\."):
        find("my.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e5", 1e5),
        ("-1.5E+3", -1500.0),
        ("1.", 1.0),
        ("12", 12),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        ("", None),
        (".inf", float("inf")),
    ],
)
def test_numbers_in_yaml_are_those_that_people_write(text: str, value: object) -> None:
    found = parse_yaml(text, "here")
    assert found == value
    assert type(found) is type(value)


def test_text_without_variables_is_left_as_it_is() -> None:
    assert expand("$HOME {HOME} $ {} ${} 100%", "here") == "$HOME {HOME} $ {} ${} 100%"


def test_the_named_runs_of_nbody_have_the_batches_and_epochs_of_the_paper() -> None:
    runs = {
        "nbody": (64, 10, 65_536),
        "nbody/short": (64, 4, 4_096),
        "nbody/short_opt": (64, 4, 4_096),
        "nbody/bs64_opt": (64, 10, 65_536),
        "nbody/bs256_opt": (256, 20, 65_536),
        "nbody/bs512_test": (512, 10, 65_536),
        "nbody/bs512_opt": (512, 40, 65_536),
        "nbody/bs2048_opt": (2048, 160, 65_536),
        "nbody/bs8192_opt": (8192, 320, 65_536),
    }
    assert set(runs) == {name for name in NAMES if name.startswith("nbody")}
    for name, expected in runs.items():
        config = resolve(name).config
        assert (config.batch.global_batch, config.epochs, config.data.train_samples()) == expected, name
        assert (config.optim.lr, config.schedule.decay, config.batch.base) == (2e-4, "cosine", 64)
        warmup = 128 if config.batch.global_batch != 64 else 0
        assert config.schedule.warmup_steps == warmup, name


def test_the_folder_of_a_project_is_answered_with_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planets" / "planets").mkdir(parents=True)
    (tmp_path / "planets" / "planets.yaml").write_text("epochs: 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no run folder: .* Did you mean the recipe planets/planets\.yaml\?$"):
        load("planets")
    monkeypatch.chdir(tmp_path / "planets")
    for folder in (".", "planets"):  # the project, and its package
        with pytest.raises(ConfigError, match=r"no run folder: .* Did you mean the recipe planets\.yaml\?$"):
            load(folder)


def test_a_folder_that_is_no_run_says_so_and_names_the_newest_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "project"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "digits").mkdir()
    assert load("digits").recipe == "digits"  # the recipe of that name
    (here / "runs").mkdir()
    for folder in ("runs", ".", ".."):
        with pytest.raises(ConfigError, match=r"is a folder without config.yaml, and so no run folder: .*tutti runs"):
            load(folder)
    for name in ("2026-11-15_101500_n2", "2026-11-16_101500_n2"):
        (here / "runs" / name).mkdir()
        (here / "runs" / name / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"It holds 2 of them, the newest is runs/2026-11-16_101500_n2\.$"):
        load("runs")
