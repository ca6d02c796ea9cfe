"""YAML that is damaged, or has a key twice, is refused with the file and the line."""

import sys
from pathlib import Path

import pytest
from damage import damaged, many, read_or_refuse
from hypothesis import given
from hypothesis import strategies as st

from tutti.bench.measure import read_variants
from tutti.cli.main import main
from tutti.config.load import resolve
from tutti.config.recipes import parse_yaml, read_yaml
from tutti.errors import ConfigError
from tutti.horovod.settings import read_settings_file
from tutti.launch.cluster.resources import load_site
from tutti.report.runs import read_run
from tutti.runs.folder import RunFolder

RECIPE = b"""\
base: &base
  extends: digits
  epochs: 3
  optim: {name: sgd, lr: 3e-4, momentum: 0.5}
  seed: 7
longer:
  <<: *base
  epochs: 5
"""
SITE = b"extends: slurm\nqueue: short\nenvironment: {A: b}\nmodules: [one, two]\ngpus_per_node: 4\n"
SETTINGS = b"params:\n  fusion_threshold_mb: 32\n  cycle_time_ms: 1.5\nlogging:\n  level: INFO\nverbose: true\n"
VARIANTS = b"more: [epochs=2]\nless: [epochs=1, optim.lr=3e-4]\n"
# Pieces of YAML, which reach more than random bytes do.
_VALUES = [
    "a",
    "1",
    "~",
    ".nan",
    "2020-01-01",
    "!!bool x",
    "!!int ''",
    "!!timestamp x",
    "!!python/name:os.x",
    "&a",
    "*a",
]
_MARKS = [
    ": ",
    "? ",
    "- ",
    "\n",
    "\n  ",
    "[",
    "]",
    "{",
    "}",
    ", ",
    "<<: *a",
    "'",
    '"',
    "|\n  x",
    "%",
    "@",
    "---\n",
    "\t",
]
WORDS = st.lists(st.sampled_from([*_VALUES, *_MARKS]), max_size=14).map("".join)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "here.yaml")
    return str(caught.value)


def test_a_key_that_is_there_twice_is_refused_with_both_lines() -> None:
    assert refusal("epochs: 1\nseed: 2\nepochs: 3\n") == (
        "here.yaml, line 3: the key 'epochs' is in line 1 already: expected each key once in a group. "
        "Remove one of them."
    )
    assert "line 4: the key 'lr' is in line 3 already" in refusal("base:\n  optim:\n    lr: 1\n    lr: 2\n")
    assert "line 1: the key 'lr' is in line 1 already" in refusal("[{lr: 1, 'lr': 2}]")
    assert "the key '1' is in line 1 already" in refusal("1: a\n'1': b\n")


def test_a_key_may_be_in_several_groups_and_in_what_is_merged() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 3}\n"
    assert parse_yaml(text, "here") == {"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}, "c": {"x": 2, "y": 3}}


@pytest.mark.parametrize("kind", ["recipe", "site", "--config-file", "--variants", "override", "run"])
def test_every_file_of_yaml_is_refused_with_a_key_twice(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("config.yaml" if kind == "run" else "mine.yaml")
    path.write_text("seed: 1\nseed: 2\n")
    read = {
        "recipe": lambda: resolve(str(path)),
        "site": lambda: load_site(str(path)),
        "--config-file": lambda: read_settings_file(str(path)),
        "--variants": lambda: read_variants(path, "digits", ()),
        "override": lambda: resolve("digits", ["optim={name: sgd, lr: 1.0, lr: 2.0}"]),
        "run": lambda: read_run(RunFolder(tmp_path)),
    }[kind]
    with pytest.raises(ConfigError) as caught:
        read()
    assert "already: expected each key once" in str(caught.value)
    assert str(path) in str(caught.value) or kind == "override"


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]",
        "a: &a {b: *a}",
        "\n".join([f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" if n else "a0: &a0 [x]" for n in range(12)]),
        "\n".join([f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" if n else "a0: &a0 {x: 1}" for n in range(60)]),
    ],
)
def test_aliases_that_stand_for_endless_values_are_refused(text: str) -> None:
    assert "more than 100,000 values" in refusal(text)


def test_values_that_are_nested_without_end_are_refused() -> None:
    assert "nested too deeply" in refusal("[" * 3000)


@pytest.mark.parametrize("text", ["!!bool x", "!!int ''", "!!timestamp x", "!!float x", "2020-13-45", "!!binary é"])
def test_a_value_that_does_not_fit_its_tag_is_refused(text: str) -> None:
    assert refusal(text).startswith("here.yaml")


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "bytes.yaml", tmp_path, tmp_path / "absent.yaml"):
        with pytest.raises(ConfigError, match=f"site {path}: cannot be read: "):
            read_yaml(path, "site")


@many(100)
@given(text=WORDS | st.text(max_size=30))
def test_any_text_is_yaml_or_refused(text: str) -> None:
    read_or_refuse(lambda: parse_yaml(text, "here.yaml"), "here.yaml")


@many(60)
@given(content=damaged(RECIPE))
def test_a_damaged_recipe_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    read_or_refuse(lambda: resolve(f"{path}/longer"), "")  # a wrong value is named with the key and the file's name


@many(40)
@given(content=damaged(SITE))
def test_a_damaged_site_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    read_or_refuse(lambda: load_site(str(path)), path)


@many(40)
@given(content=damaged(SETTINGS))
def test_damaged_settings_of_horovodrun_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(content)
    read_or_refuse(lambda: read_settings_file(str(path)), path)


@many(30)
@given(content=damaged(VARIANTS))
def test_damaged_variants_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "variants.yaml"
    path.write_bytes(content)
    read_or_refuse(lambda: read_variants(path, "digits", ()), path)


@pytest.mark.parametrize("seed", ["99999999999999999999", "-1", str(2**63), "1.5", "true"])
@pytest.mark.parametrize("key", ["seed", "data.seed"])
def test_a_seed_out_of_range_ends_with_exit_code_2(
    seed: str, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    synthetic = ["data.name=synthetic"] if key == "data.seed" else []
    monkeypatch.setattr(sys, "argv", ["tutti", "train", "digits", *synthetic, f"{key}={seed}"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"error: {key}={seed.replace('true', 'True')} (command line): expected a whole number")
    assert "." in seed or "true" in seed or "from 0 to 9223372036854775807, for example 42." in said
    assert not any(tmp_path.iterdir())


def test_the_largest_seed_is_taken() -> None:
    assert resolve("digits", [f"seed={2**63 - 1}"]).config.seed == 2**63 - 1
