"""A recipe's name and overrides become one frozen configuration, or a message that says what to do."""

import contextlib
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tutti.config import load as load_module
from tutti.config.load import Resolved, load, resolve, resolve_values
from tutti.config.recipes import built_in
from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.runs.folder import RunFolder, write_config

MODELS = (
    "mlp, small_cnn, mnist_torch, mnist_keras, cnn, alexnet_small, cifar_fast, resnet_small, resnet18, resnet34, "
    "resnet50, unet3d, gpt, vit"
)

RUNS = """\
base:
  data: {name: synthetic, shape: [3], classes: 2, train: 64, valid: 8}
  model: {name: mlp, hidden: [4, 4], dropout: 0.5}
  optim: {name: sgd, lr: 0.1, momentum: 0.9}
  batch: {global: 8}
  epochs: 2
long:
  extends: base
  epochs: 20
  schedule: {warmup_steps: 5, decay: cosine}
longer:
  extends: long
  epochs: 200
  optim: {lr: 0.2}
"""


def write(path: Path, text: str) -> str:
    """A recipe file, as the path that a user would type."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture
def runs(tmp_path: Path) -> str:
    return write(tmp_path / "my.yaml", RUNS)


def refusal(recipe: str, *overrides: str) -> str:
    """The message with which a recipe is refused."""
    with pytest.raises(ConfigError) as caught:
        resolve(recipe, overrides)
    return str(caught.value)


def sources(resolved: Resolved) -> dict[str, tuple[Any, str]]:
    return {".".join(key): (value, source) for key, value, source in resolved.entries()}


def test_each_named_run_holds_what_it_extends_with_its_own_values_on_top(runs: str) -> None:
    base, long, longer = load(runs), load(f"{runs}/long"), load(f"{runs}/longer")
    assert [base.epochs, long.epochs, longer.epochs] == [2, 20, 200]
    assert [base.schedule.decay, long.schedule.decay, longer.schedule.decay] == ["constant", "cosine", "cosine"]
    assert longer.optim.options() == {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}
    assert [base.recipe, long.recipe, longer.recipe] == ["my", "my/long", "my/longer"]


def test_a_file_with_the_keys_of_one_run_is_that_run(tmp_path: Path) -> None:
    path = write(tmp_path / "one.yaml", "extends: digits\nepochs: 3\n")
    config = load(path)
    assert (config.epochs, config.model.name, config.recipe) == (3, "small_cnn", "one")


def test_a_run_named_by_a_number_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "sizes.yaml", RUNS + "512: {extends: base, batch: {global: 512}}\n")
    assert load(f"{path}/512").batch.global_batch == 512


@pytest.mark.parametrize(
    ("parent", "epochs"),
    [
        ("digits", 20),
        ("mnist/large_batch", 12),
        ("other.yaml", 2),
        ("other.yaml/longer", 200),
        ("below/deep.yaml", 7),
    ],
)
def test_a_run_extends_a_built_in_recipe_or_a_file_beside_its_own(tmp_path: Path, parent: str, epochs: int) -> None:
    write(tmp_path / "other.yaml", RUNS)
    write(tmp_path / "below" / "deep.yaml", "epochs: 7\nextends: sibling.yaml\n")
    write(tmp_path / "below" / "sibling.yaml", RUNS)
    path = write(tmp_path / "mine.yaml", f"mine:\n  extends: {parent}\n  seed: 7\n")
    config = load(f"{path}/mine")
    assert (config.epochs, config.seed, config.recipe) == (epochs, 7, "mine/mine")


@pytest.mark.parametrize(
    ("text", "circle"),
    [
        ("base: {extends: base}", "base -> base"),
        ("base: {extends: a}\na: {extends: b}\nb: {extends: a}", "base -> a -> b -> a"),
        ("base: {extends: other.yaml}", "base -> base -> base"),
    ],
)
def test_a_circle_of_extends_is_refused_with_its_names(tmp_path: Path, text: str, circle: str) -> None:
    write(tmp_path / "other.yaml", "base: {extends: circle.yaml}")
    path = write(tmp_path / "circle.yaml", text)
    assert refusal(path).endswith(f"`extends` goes in a circle: {circle}. Remove one of them.")


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "0.0003", "3.e-4", ".0003", "+3e-4", "0.3e-3"])
def test_an_override_reads_numbers_as_people_write_them(text: str) -> None:
    assert load("digits", f"optim.lr={text}").optim.lr == 3e-4


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("epochs=3", "epochs", 3),
        ("optim.lr=1", "optim.lr", 1.0),
        ("schedule.milestones=[1, 2.5]", "schedule.milestones", [1.0, 2.5]),
        ("log.tensorboard=false", "log.tensorboard", False),
        ("log={every_steps: 3, ledger: true}", "log.ledger", True),
        ("out=runs/here=there", "out", "runs/here=there"),
        ("out=1.2.3", "out", "1.2.3"),
        ("out='3e-4'", "out", "3e-4"),
        ("checkpoint.best=null", "checkpoint.best", None),
    ],
)
def test_an_override_is_a_value_in_yaml(override: str, key: str, value: object) -> None:
    overrides = [override, "schedule.decay=step"] if "milestones" in key else [override]
    found = sources(resolve("digits", overrides))[key]
    assert found == (value, "command line")
    assert type(found[0]) is type(value)


@pytest.mark.parametrize("text", ["5", "1.5", "1.50", "007", "2026_11", "1e3", "12:30"])
def test_text_that_looks_like_a_number_is_kept_as_typed_or_refused(text: str) -> None:
    found = text
    with contextlib.suppress(ConfigError):
        found = load("digits", f"out={text}").out
    assert found == text


def test_a_later_target_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = write(tmp_path / "own.yaml", "extends: digits\nstop_at: {valid_accuracy: 0.9}")
    assert load(path).stop_at == {"valid_accuracy": 0.9}
    assert load(path, "stop_at.valid_loss=1e-05").stop_at == {"valid_loss": 1e-5}
    assert load(path, "stop_at=null").stop_at is None


def test_the_last_override_of_a_key_wins_and_leaves_the_keys_beside_it(runs: str) -> None:
    config = load(runs, "optim.lr=1.0", "optim={lr: 2.0}", "optim.lr=3.0")
    assert (config.optim.lr, config.optim.options()["momentum"]) == (3.0, 0.9)


def test_variables_are_filled_in_from_the_environment(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "here")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("ABSENT", raising=False)
    text = "${PLACE}/${ABSENT:-there}/${PLACE:-unused}/${ABSENT:-}/${EMPTY:-unused}$PLACE"
    assert load(runs, f"out={text}").out == "here/there/here//$PLACE"


def test_a_variable_that_names_another_is_not_expanded_again(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTER", "${INNER}/x")
    monkeypatch.setenv("INNER", "unexpected")
    assert refusal(runs, "out=${OUTER}") == (
        "out: '${OUTER}' becomes '${INNER}/x', which uses ${INNER} in turn: expected a value without variables. "
        "Set the variable to its final value."
    )


def test_each_override_is_expanded_once(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(load_module, "expand", lambda text, _: seen.append(text) or text)
    load(runs, "out=${PLACE}", "recipe=mine")
    assert seen.count("${PLACE}") == 1


def test_a_variable_that_is_not_set_is_refused_with_two_ways_out(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    assert refusal(runs, "out=${ABSENT}/x") == (
        "out: '${ABSENT}/x' uses ${ABSENT}, which is not set. Set it (export ABSENT=...), or write ${ABSENT:-default}."
    )
    assert load(runs, "out=${ABSENT:-default}/x").out == "default/x"
    monkeypatch.setenv("ABSENT", "set")
    assert load(runs, "out=${ABSENT}/x").out == "set/x"


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("batch.global=16", (16, None)),
        ("batch.per_rank=4", (None, 4)),
        ("batch={per_rank: 4}", (None, 4)),
        ("batch.per_rank=null", (8, None)),
    ],
)
def test_one_way_of_giving_the_batch_replaces_the_other(
    runs: str, override: str, found: tuple[int | None, int | None]
) -> None:
    batch = load(runs, override).batch
    assert (batch.global_batch, batch.per_rank) == found


def test_alternatives_replace_each_other_back_and_forth(runs: str) -> None:
    batch = load(runs, "batch.per_rank=4", "batch.global=32", "batch.per_rank=null").batch
    assert (batch.global_batch, batch.per_rank) == (32, None)
    schedule = load(f"{runs}/long", "schedule.warmup_epochs=0.5").schedule
    assert (schedule.warmup_steps, schedule.warmup_epochs) == (None, 0.5)
    schedule = load(f"{runs}/long", "schedule.warmup_epochs=0.5", "schedule.warmup_steps=3").schedule
    assert (schedule.warmup_steps, schedule.warmup_epochs) == (3, None)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("batch: {global: 8, per_rank: 4}", "expected exactly one of batch.global and batch.per_rank"),
        (
            "schedule: {warmup_steps: 8, warmup_epochs: 4}",
            "expected at most one of schedule.warmup_steps and schedule.warmup_epochs",
        ),
    ],
)
def test_two_alternatives_in_one_run_are_refused(tmp_path: Path, run: str, message: str) -> None:
    path = write(tmp_path / "both.yaml", f"extends: digits\n{run}\n")
    assert message in refusal(path)


def test_choosing_another_part_drops_the_options_of_the_old_one(runs: str) -> None:
    assert load(runs, "model.name=small_cnn").model.options() == {"width": 32, "dropout": 0.2, "batch_norm": True}
    assert load(runs, "optim={name: adam, lr: 0.1}").optim.options()["betas"] == (0.9, 0.999)
    assert refusal(runs, "optim.name=adam") == (
        "optim.lr is missing: set it in the recipe, or on the command line as optim.lr=..."
    )


@pytest.mark.parametrize("name", ["mlp", "${NETWORK:-mlp}"])
def test_naming_the_same_part_again_keeps_its_options(
    tmp_path: Path, runs: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NETWORK", raising=False)
    again = write(tmp_path / "again.yaml", f"extends: my.yaml\nmodel: {{name: '{name}'}}\n")
    for config in (load(again), load(runs, f"model.name={name}")):
        assert config.model.options() == {"hidden": (4, 4), "dropout": 0.5, "batch_norm": False}


def test_overrides_hold_in_whatever_order_they_are_given() -> None:
    name, option = "model.name=mlp", "model.hidden=[8]"
    assert load("digits", name, option).model == load("digits", option, name).model


def test_every_value_says_where_it_came_from(runs: str) -> None:
    resolved = resolve(f"{runs}/longer", ["batch.per_rank=4", "model.name=small_cnn"])
    found = sources(resolved)
    expected = {
        "recipe": ("my/longer", "name of the recipe"),
        "data.shape": ([3], "my.yaml [base]"),
        "data.noise": (1.0, "default"),
        "optim.lr": (0.2, "my.yaml [longer]"),
        "optim.momentum": (0.9, "my.yaml [base]"),
        "schedule.decay": ("cosine", "my.yaml [long]"),
        "epochs": (200, "my.yaml [longer]"),
        "batch.per_rank": (4, "command line"),
        "batch.global": (None, "default"),
        "model.name": ("small_cnn", "command line"),
        "model.dropout": (0.2, "default"),
        "seed": (42, "default"),
    }
    assert {key: found[key] for key in expected} == expected
    assert sources(resolve("digits"))["epochs"] == (20, "recipes/digits.yaml [base]")


def test_the_entries_are_the_whole_configuration(runs: str) -> None:
    resolved = resolve(runs, ["model={name: 'a:b', deep: {er: 1}, none: {}}"])
    nested: dict[str, Any] = {}
    for (*outer, last), value, _ in resolved.entries():
        target = nested
        for word in outer:
            target = target.setdefault(word, {})
        target[last] = value
    assert nested == resolved.config.plain()


@pytest.mark.parametrize("name", ["images", "packed"])
def test_the_disk_of_a_host_has_a_place_on_each(name: str) -> None:
    words = [f"data={{name: {name}}}"]
    for folder in ("/local/scratch", "$SLURM_TMPDIR/data", "~/data"):
        assert sources(resolve("imagenet/resnet18", [*words, f"data.stage={folder}"]))["data.stage"][0] == folder
    with pytest.raises(ConfigError, match=r"^data\.stage='copies' \(command line\): expected an absolute path or one"):
        resolve("imagenet/resnet18", [*words, "data.stage=copies"])


def test_a_section_emptied_on_the_command_line_no_longer_comes_from_the_recipe() -> None:
    assert sources(resolve("digits", ["schedule={}"]))["schedule.decay"] in [
        ("constant", "command line"),
        ("constant", "default"),
        ("cosine", "recipes/digits.yaml [base]"),
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optim.momentun=1",
            "unknown key 'optim.momentun' (command line): expected one of name, lr, clip_norm, momentum, weight_decay, "
            "nesterov. Did you mean 'momentum'?",
        ),
        (
            "batch.globl=8",
            "unknown key 'batch.globl' (command line): expected one of global, per_rank, micro, base, eval. "
            "Did you mean 'global'?",
        ),
        ("epochs=2.0", "epochs=2.0 (command line): expected a whole number."),
        ("epochs=true", "epochs=True (command line): expected a whole number."),
        ("epochs=0", "epochs=0 (command line): expected a number greater than 0."),
        ("seed=-1", "seed=-1 (command line): expected a whole number from 0 to 9223372036854775807, for example 42."),
        ("optim.lr=fast", "optim.lr='fast' (command line): expected a number."),
        ("optim.lr=.nan", "optim.lr=nan (command line): expected a finite number."),
        ("model.dropout=1", "model.dropout=1 (command line): expected a number less than 1."),
        ("model.hidden=5", "model.hidden=5 (command line): expected a list."),
        ("log.tensorboard=1", "log.tensorboard=1 (command line): expected true or false."),
        ("out=[5]", "out=[5] (command line): expected text; put it in quotes, as in '\"512\"'."),
        ("out=true", "out=True (command line): expected text; put it in quotes, as in '\"512\"'."),
        ("batch=5", "batch=5 (command line): expected a group of keys."),
        (
            "precision=bf61",
            "precision='bf61' (command line): expected 'fp32', 'bf16' or 'fp16'. Did you mean 'bf16'?",
        ),
        (
            "schedule.decay=cosin",
            "schedule.decay='cosin' (command line): expected 'constant', 'cosine', 'linear' or 'step'. "
            "Did you mean 'cosine'?",
        ),
        (
            "model.name=mpl",
            f"model.name='mpl' (command line): expected one of {MODELS}, or module:object. Did you mean 'mlp'?",
        ),
        (
            "data.name=digit",
            "data.name='digit' (command line): expected one of digits, synthetic, mnist, cifar10, images, packed, "
            "nbody, text, or module:object. Did you mean 'digits'?",
        ),
        (
            "optim.name=adamm",
            "optim.name='adamm' (command line): expected one of sgd, adam, adamw, lars, lamb, muon, or module:object. "
            "Did you mean 'adam'?",
        ),
        (
            "loss.name=zzz",
            "loss.name='zzz' (command line): expected one of cross_entropy, mse, l1, or module:object.",
        ),
        (
            "metrics=[accuracy, acuracy]",
            "metrics (command line): unknown metric 'acuracy': expected accuracy, top5 or module:object. "
            "Did you mean 'accuracy'?",
        ),
        (
            "schedule.decay=step",
            "schedule: expected schedule.milestones exactly when schedule.decay is 'step'.",
        ),
        (
            "schedule={decay: step, milestones: [2, 1]}",
            "schedule: expected schedule.milestones in rising order.",
        ),
        ("batch.global=null", "batch: expected exactly one of batch.global and batch.per_rank."),
        ("epochs", "override 'epochs': expected key=value, for example optim.lr=3e-4 or epochs=2."),
        ("a-b=1", "override 'a-b=1': expected key=value, for example optim.lr=3e-4 or epochs=2."),
        ("optim..lr=1", "override 'optim..lr=1': expected key=value, for example optim.lr=3e-4 or epochs=2."),
    ],
)
def test_a_wrong_override_is_refused_with_what_was_expected(runs: str, override: str, message: str) -> None:
    assert refusal(runs, override) == message


def test_an_unknown_key_at_the_top_names_its_file_and_the_nearest_key(tmp_path: Path) -> None:
    path = write(tmp_path / "typo.yaml", "extends: digits\nepochs: 2\nprecison: bf16\n")
    message = refusal(path)
    assert message.startswith("unknown key 'precison' (typo.yaml [base]): expected one of recipe, framework, ")
    assert message.endswith(" Did you mean 'precision'?")


def test_all_wrong_keys_are_reported_at_once(runs: str) -> None:
    assert refusal(runs, "epochs=0", "seed=-1", "model.name=mpl").splitlines() == [
        f"model.name='mpl' (command line): expected one of {MODELS}, or module:object. Did you mean 'mlp'?",
        "epochs=0 (command line): expected a number greater than 0.",
        "seed=-1 (command line): expected a whole number from 0 to 9223372036854775807, for example 42.",
    ]


def test_missing_keys_are_named_with_how_to_set_them(tmp_path: Path) -> None:
    path = write(tmp_path / "half.yaml", "data: {name: digits}\nbatch: {global: 8}\noptim: {name: sgd}\n")
    assert refusal(path).splitlines() == [
        f"{key} is missing: set it in the recipe, or on the command line as {key}=..."
        for key in ("model", "optim.lr", "epochs")
    ]


def test_a_list_that_is_too_short_is_refused_with_a_fix_that_can_be_typed() -> None:
    message = refusal("digits", "optim.betas=[0.9]")
    assert "optim.betas" in message
    assert "optim.betas.1=" not in message


def test_a_section_given_as_a_name_is_refused_as_such() -> None:
    message = refusal("digits", "model=mlp")
    assert "model" in message
    assert "Did you mean 'mlp'?" not in message


def test_a_date_that_does_not_exist_is_refused_with_a_message() -> None:
    assert "2024-13-45" in refusal("digits", "out=2024-13-45")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("digit", f"unknown recipe 'digit': expected one of {', '.join(name for name, _ in built_in())}, or the path "),
        ("mnist/lage_batch", "recipe mnist.yaml: there is no run 'lage_batch': expected one of base, keras, "),
    ],
)
def test_an_unknown_recipe_is_refused_with_the_list_and_the_nearest(recipe: str, message: str) -> None:
    found = refusal(recipe)
    assert found.startswith(message)
    assert found.endswith({"d": " Did you mean 'digits'?", "m": " Did you mean 'large_batch'?"}[recipe[0]])


def test_a_mistyped_extends_offers_the_runs_of_its_own_file(tmp_path: Path) -> None:
    path = write(tmp_path / "my.yaml", RUNS + "mine: {extends: longr}\n")
    message = refusal(f"{path}/mine")
    assert "'longr'" in message
    assert any(f"Did you mean '{name}'?" in message for name in ("long", "longer"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base:\n  epochs: [1\n", ", line 3: not valid YAML: expected ',' or ']', but got '<stream end>'."),
        ("base:\n\tepochs: 1\n", ", line 2: not valid YAML: found character '\\t' that cannot start any token."),
        ("base: !!python/name:os.system x\n", ", line 1: not valid YAML: could not determine a constructor"),
        ("- base\n- long\n", ": expected a mapping of runs or of a run's keys, found ['base', 'long']."),
        ("", ": expected a mapping of runs or of a run's keys, found None."),
        ("base: [1, 2]\n", ": run 'base' is [1, 2]: expected a mapping of keys."),
        ("other: {epochs: 1}\n", ": there is no run 'base': expected one of other."),
        ("epochs: 1\nextends: [a, b]\n", ": extends=['a', 'b'] in run 'base': expected the name of a run."),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "bad.yaml", text)
    found = refusal(path)
    assert message in found
    assert "bad.yaml" in found


def test_a_file_that_is_missing_or_not_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = f"no such file in {tmp_path}. Give the path of a YAML file."
    assert refusal("absent.yaml") == f"recipe 'absent.yaml': {message}"
    assert refusal("absent.yaml/run") == f"recipe 'absent.yaml/run': {message}"
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert refusal("bytes.yaml").startswith("recipe bytes.yaml: cannot be read: ")


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("digits", []),
        ("digits/mlp", []),
        ("hello", ["optim={name: adamw, lr: 2e-5, betas: [0.8, 0.9]}"]),
        ("mnist/keras", ["schedule.warmup_steps=3", "batch.global=32"]),
        ("mnist/large_batch", ["schedule.decay=step", "schedule.milestones=[1, 2.5]"]),
        ("digits", ["model={name: 'my.net:Net', depth: 3, deep: {er: [1, null]}, nothing: {}}"]),
        ("digits", ["data={name: 'my.data:make', path: x, workers: 2}", "metrics=[top5, 'm:f']"]),
        ("digits", ["model={name: 'a:B', mode: '1e-3'}"]),
        ("digits", ["out='1e3'"]),
        ("digits", ["out='null'"]),
        ("digits", ["out='2024-01-01'"]),
        ("digits", ["out='a: b # ü'"]),
    ],
)
def test_a_configuration_written_down_and_read_again_is_equal(
    tmp_path: Path, recipe: str, overrides: list[str]
) -> None:
    config = resolve(recipe, overrides).config
    folder = RunFolder(tmp_path)
    write_config(folder, config.as_yaml())
    assert resolve(str(folder.config)).config == config


def test_a_configuration_is_frozen(runs: str) -> None:
    config = load(runs)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.epochs = 3
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.optim.lr = 3.0
    assert isinstance(config, RunConfig) and config == load(runs)


def test_a_resolved_configuration_does_not_change_with_the_next_one(runs: str) -> None:
    before = resolve(runs)
    resolve(runs, ["epochs=9", "optim.lr=9.0"])
    assert sources(before) == sources(resolve(runs))


def test_plain_values_are_checked_as_those_of_a_recipe_are() -> None:
    values = {
        "data": {"name": "digits"},
        "model": {"name": "mlp"},
        "optim": {"name": "sgd", "lr": 0.1},
        "batch": {"global": 8},
        "epochs": 1,
    }
    assert resolve_values(values).recipe == "unnamed"
    with pytest.raises(ConfigError, match=r"^unknown key 'epoch' \(fit\(\)\): .* Did you mean 'epochs'\?$"):
        resolve_values(values | {"epoch": 1})
