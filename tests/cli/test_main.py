"""The commands as they are joined: their list, their help, and the optional value of --resume."""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import command
from typer.testing import CliRunner

from tutti.cli import options, scale, sweep, train
from tutti.cli.main import HIDDEN, MODULES, app

COMMANDS = [name for name in MODULES if name not in HIDDEN]
SHARED = {"main", "options", "ranks", "studies"}
FOLDERS = {name.rpartition(".")[0] for name in MODULES.values()}
PROBE = """
import contextlib, io, json, sys
from tutti.cli.main import main
loaded = {}
for name in sys.argv[1:]:
    sys.argv = ["tutti", name, "--help"]
    before = set(sys.modules)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    loaded[name] = sorted(set(sys.modules) - before)
print(json.dumps(loaded))
"""


def test_help_lists_all_commands_in_order_with_what_they_do() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "500"}).output
    table = shown.partition("Commands")[2].partition("╰")[0]
    rows = [line.strip("│ ").split(maxsplit=1) for line in table.splitlines()[1:]]
    listed = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert list(listed) == COMMANDS
    for name, text in listed.items():
        own = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "500"}).output
        assert own.strip().splitlines()[2].strip() == text


@pytest.mark.parametrize("name", [*COMMANDS, "data get", "data make", "data make images"])
def test_help_of_every_command_has_an_example(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "500"}).output
    assert "Example" in shown, shown
    examples = [line.strip() for line in shown.rpartition("Example")[2].splitlines()[1:] if line.strip()]
    assert any(f"tutti {name}" in line for line in examples), shown
    assert not any("tutti" in line.partition("tutti")[2] for line in examples), "one on each line"


@pytest.mark.parametrize("words", [[], ["train"], ["data", "pack"]], ids=" ".join)
def test_help_shows_no_type_of_flags_which_take_no_value(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "500"}).output
    [flag] = [line.split() for line in shown.splitlines() if line.startswith("│ --help")]
    assert flag[1:5] == ["--help", "-h", "Show", "this"]
    assert "bool" not in shown


def test_help_of_tutti_begins_with_a_command_to_try() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "500"}).output
    assert shown.partition("Examples:")[2].splitlines()[1].strip() == "tutti train digits -n 2"


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_train", interrupt)
    done = CliRunner().invoke(app, ["train", "digits"])
    assert (done.exit_code, done.stderr) == (130, "stopped on SIGINT\n")


def test_a_misspelled_command_suggests_the_right_one() -> None:
    done = CliRunner().invoke(app, ["trian"], env={"COLUMNS": "500"})
    assert done.exit_code == 2
    assert "No such command 'trian'. Did you mean 'train'" in done.output


@pytest.mark.system
def test_help_of_a_command_imports_its_own_module_and_nothing_heavy(tmp_path: Path) -> None:
    for group in (COMMANDS[::2], COMMANDS[1::2]):  # what is loaded once is seen once
        done = command(sys.executable, "-c", PROBE, *group, cwd=tmp_path)
        for name, loaded in json.loads(done.out).items():
            own = {module.removeprefix("tutti.cli.") for module in loaded if module.startswith("tutti.cli.")}
            assert own - SHARED - FOLDERS <= {MODULES[name]}, name
            assert not {"torch", "tensorflow", "plotly", "matplotlib.pyplot"} & set(loaded), name


def test_commands_import_no_other_command() -> None:
    files = [path for path in Path(options.__file__).parent.rglob("*.py") if path.stem not in SHARED]
    for path in files:
        for part in ast.parse(path.read_text()).body:
            if isinstance(part, ast.ImportFrom) and (part.module or "").startswith("tutti.cli."):
                assert str(part.module).removeprefix("tutti.cli.") not in MODULES.values(), path


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What a command does with its words, in an empty folder."""
    found: dict[str, Any] = {}

    def keep(*names: str) -> Any:
        return lambda *given: found.update(zip(names, given, strict=False))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_train", keep("recipe", "overrides", "ranks", "resume"))
    for module in (scale, sweep):
        monkeypatch.setattr(module, "resume_study", keep("resume"))
    return found


@pytest.mark.parametrize(
    ("words", "resume", "overrides"),
    [
        (["--resume"], "latest", []),
        (["--resume", "-n", "2"], "latest", []),
        (["--resume", "optim.lr=0.1"], "latest", ["optim.lr=0.1"]),
        (["--resume", "out=/scratch/runs", "epochs=3"], "latest", ["out=/scratch/runs", "epochs=3"]),
        (["--resume", "optm.lr=0.1"], "latest", ["optm.lr=0.1"]),
        (["--resume=latest"], "latest", []),
        (["--resume", "latest", "epochs=3"], "latest", ["epochs=3"]),
        (["--resume", "runs/digits/one"], "runs/digits/one", []),
        (["--resume", "a=b/run"], "a=b/run", []),
        (["--resume", "a=b/run", "epochs=3"], "a=b/run", ["epochs=3"]),
        (["--resume=a=b/run"], "a=b/run", []),
        (["--resume=epochs=3"], "epochs=3", []),
        (["--resume", "./lr=0.1"], "./lr=0.1", []),
        (["epochs=3", "--resume"], "latest", ["epochs=3"]),
        ([], None, []),
    ],
)
def test_resume_takes_a_value_or_none(
    words: list[str], resume: str | None, overrides: list[str], called: dict[str, Any]
) -> None:
    app(["train", "digits", *words], standalone_mode=False)
    assert called["resume"] == resume
    assert called["overrides"] == overrides


def test_a_folder_that_reads_like_an_override_is_resumed(called: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    app(["train", "digits", "--resume", "lr=0.1"], standalone_mode=False)
    assert (called["resume"], called["overrides"]) == ("lr=0.1", [])


@pytest.mark.parametrize("study", ["scale", "sweep"])
def test_studies_are_resumed_in_the_same_way(study: str, called: dict[str, Any]) -> None:
    for words, resume in ((["--resume"], "latest"), (["--resume", "--retry"], "latest"), (["--resume", "a"], "a")):
        app([study, *words], standalone_mode=False)
        assert called.pop("resume") == resume
