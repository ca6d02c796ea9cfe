"""The commands in the README and in the pages of docs/ run as they are written."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, command

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.ranks
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    programs = Path(sys.executable).parent
    for line in commands(page):
        if line.startswith("mpirun"):
            if shutil.which("mpirun.openmpi") is None:
                continue
            line = line.replace("mpirun", "mpirun.openmpi", 1)
        path = f"{programs}:{os.environ['PATH']}"
        done = command("bash", "-c", line, cwd=tmp_path, PATH=path, **ROOT)
        assert done.code == 0, f"{line}\n{done.all}"


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_key_of_a_recipe_is_on_its_page() -> None:
    from tutti.config.run import RunConfig

    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    for name, field in RunConfig.model_fields.items():
        if name == "recipe":
            continue
        assert name in page, name
        for inner, inner_field in getattr(field.annotation, "model_fields", {}).items():
            assert (inner_field.alias or inner) in page, f"{name}.{inner}"
