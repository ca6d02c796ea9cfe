"""Completion in a shell: commands and recipes, without torch."""

import shlex
import sys
from pathlib import Path

import pytest
from conftest import command

from tutti.cli.options import complete_recipe
from tutti.config.recipes import built_in

MNIST = [name for name, _ in built_in() if name.startswith("mnist")]
# The words as bash hands them to the function that `tutti --show-completion` prints.
COMPLETE = """
eval "$(tutti --show-completion)"
for line in "$@"; do
    read -ra COMP_WORDS <<< "$line"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _tutti_completion tutti
    echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.system
def test_bash_completes_commands_and_recipes_without_torch(tmp_path: Path) -> None:
    for name in ("torch", "tensorflow"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported for a completion')")
    (tmp_path / "mine.yaml").touch()
    typed = ["tutti sche", "tutti train digi", "tutti bench mi"]
    script = f"set -- {shlex.join(typed)}\n{COMPLETE}"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = command("bash", "-c", script, cwd=tmp_path, PATH=path, PYTHONPATH=str(tmp_path))
    assert done.err == ""
    assert [line.split() for line in done.out.splitlines()] == [
        ["schema"],
        ["digits", "digits/mlp"],
        ["mine.yaml"],
    ]


def test_recipes_are_offered_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    for file in ("my.yaml", "my.txt", "below/my[1].yml", "below/other.yaml"):
        (tmp_path / file).touch()
    (tmp_path / "my_folder.yaml").mkdir()
    assert [name for name, _ in complete_recipe("")] == [*(name for name, _ in built_in()), "my.yaml"]
    assert [name for name, _ in complete_recipe("m")] == [*MNIST, "my.yaml"]
    assert complete_recipe("./m") == [("./my.yaml", "a recipe's file")]
    assert [name for name, _ in complete_recipe("below/my[")] == ["below/my[1].yml"]
    assert [name for name, _ in complete_recipe(f"{tmp_path}/below/o")] == [f"{tmp_path}/below/other.yaml"]
    assert complete_recipe("nothing/like") == []
