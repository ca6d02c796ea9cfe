"""The commands in the README and in the pages of docs/ run as they are written."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import prepared
import pytest
import yaml
from conftest import REPOSITORY, command
from typer.testing import CliRunner

from tutti.cli.main import app

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
IN_TENSORFLOW = re.compile(r"tensorflow|keras", re.IGNORECASE)
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


# Commands that other tests cover; make test-slow runs them too.
ELSEWHERE = (
    "tutti train digits -n 2 framework=",  # tests/frameworks
    "KERAS_BACKEND=torch",  # tests/horovod/keras
    "tutti train cifar10/cnn",  # this and the next five: tests/train/test_workloads.py, tests/data
    "tutti train imagenet/resnet18",
    "tutti train nbody",
    "tutti data make images",
    "tutti data pack",
    "tutti data make nbody",
    "tutti run -n 2 examples/horovod/pytorch_mnist.py --epochs 1",  # with --device on the page of the tutorials
    "mpirun --oversubscribe -np 2 python examples/horovod",  # tests/horovod/run/test_horovodrun.py
    "mpirun --oversubscribe -np 2 tutti train digits",  # tests/launch/test_mpi.py
    "horovodrun -np 2 python examples/horovod/pytorch_mnist.py --epochs 1",  # with two epochs on the page of Horovod
    "tutti train digits/mlp -n 2 epochs=1",  # with two epochs on the page about running
    "tutti bench digits",  # this and the next two: tests/bench
    "tutti tune digits",
    "tutti profile digits",
    "tutti scale digits",  # this and the next one: tests/study
    "tutti sweep digits --find-rate",
    "tutti train examples/own_model.yaml",  # this and the next two: tests/test_examples.py
    "python examples/own_model.py",
    "tutti run -n 2 examples/own_model.py",
    "horovodrun -np 2 python examples/horovod/tensorflow2_resnet34.py",  # tests/test_examples.py
    "tutti run -n 2 examples/pinn.py",  # tests/train/test_own.py
    "cd planets && tutti train planets.yaml",  # tests/cli/test_new.py
)


def run_commands(lines: list[str], tmp_path: Path, path: Sequence[Path]) -> None:
    """Run each command in a shell whose PATH begins with the folders of `path`."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    folders = os.pathsep.join([*map(str, path), os.environ["PATH"]])
    for line in lines:
        if line.startswith("mpirun"):
            if shutil.which("mpirun.openmpi") is None:
                continue
            line = line.replace("mpirun", "mpirun.openmpi", 1)
        env = prepared.variables(prepared.TENSORFLOW if IN_TENSORFLOW.search(line) else prepared.TORCH)
        done = command("bash", "-c", line, cwd=tmp_path, PATH=folders, **ROOT, **env)
        assert done.code == 0, f"{line}\n{done.all}"


def in_a_group(page: Path) -> Any:
    """Put pages whose programs need TensorFlow into one xdist group, so that one worker imports it once."""
    needs = any(IN_TENSORFLOW.search(line) for line in commands(page))
    return pytest.param(page, marks=pytest.mark.xdist_group("tensorflow")) if needs else page


@pytest.mark.system
@pytest.mark.parametrize("page", [in_a_group(page) for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    lines = [line for line in commands(page) if not line.startswith(ELSEWHERE)]
    if any(IN_TENSORFLOW.search(line) for line in lines):
        prepared.server(prepared.TENSORFLOW)
    run_commands(lines, tmp_path, [prepared.QUICK, Path(sys.executable).parent])


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_all_commands_of_a_page_run_in_interpreters_of_their_own(page: Path, tmp_path: Path) -> None:
    run_commands(commands(page), tmp_path, [Path(sys.executable).parent])


def test_what_is_left_to_the_slow_tests_is_on_a_page() -> None:
    lines = [line for page in PAGES for line in commands(page)]
    for start in ELSEWHERE:
        assert any(line.startswith(start) for line in lines), start


def test_each_command_in_the_tables_of_the_tutorials_runs_or_says_why_not() -> None:
    executed = {line for page in PAGES for line in commands(page)}
    rows = re.findall(r"^\|.*\|$", (REPOSITORY / "docs" / "from-the-tutorials.md").read_text(), re.MULTILINE)
    checked = 0
    for row in rows:
        ours, expected = (cell.strip() for cell in row.split("|")[2:4])
        for line in re.findall(r"`((?:tutti|horovodrun|python) [^`]+)`", ours):
            assert line in executed or expected.startswith("not run: "), row
            checked += 1
    assert checked > 15


HELP = sorted((REPOSITORY / "tutti" / "cli").rglob("*.py"))
SUBMISSION = re.compile(r"tutti submit ((?:digits|mnist|nbody|cifar10|imagenet)[\w/]* --on [^`|\n\"#]+)")


SUBMITTING = [page for page in [*PAGES, *HELP] if SUBMISSION.search(page.read_text())]


@pytest.mark.parametrize("page", SUBMITTING, ids=lambda page: page.stem)
def test_submissions_of_a_page_are_accepted(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in SUBMISSION.findall(page.read_text()):
        done = CliRunner().invoke(app, ["submit", *words.split(), "--dry-run"])
        assert done.exit_code == 0, f"{words}\n{done.exception}"


def anchors(page: Path) -> list[str]:
    """The anchors that Markdown viewers give the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


def test_the_index_lists_every_page() -> None:
    index = (REPOSITORY / "docs" / "index.md").read_text()
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert page.stem == "index" or f"({page.name})" in index, page.name


def test_the_site_has_every_page_once() -> None:
    settings = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
    groups = [group if isinstance(group, str) else next(iter(group.values())) for group in settings["nav"]]
    listed = [page for group in groups for page in ([group] if isinstance(group, str) else group)]
    others = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
    assert sorted(listed) == sorted([*others, *(f"docs/{page.name}" for page in (REPOSITORY / "docs").glob("*.md"))])


def test_every_key_of_a_recipe_is_on_its_page() -> None:
    from tutti.config.run import RunConfig

    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    for name, field in RunConfig.model_fields.items():
        if name == "recipe":
            continue
        assert name in page, name
        for inner, inner_field in getattr(field.annotation, "model_fields", {}).items():
            assert (inner_field.alias or inner) in page, f"{name}.{inner}"
