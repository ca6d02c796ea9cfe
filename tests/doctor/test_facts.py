"""The facts of a rank: digests of code and data, memory, limits."""

import shutil
import sys
from pathlib import Path

import pytest

import tutti
from tutti.config.check import data_paths
from tutti.config.load import resolve, resolve_values
from tutti.doctor.facts import digest_of_module, read_limits, state_of, user_code
from tutti.ranks.cores import read_memory
from tutti.ranks.group import digest_of_package, fingerprint, own_code


def test_a_fingerprint_has_versions_and_code() -> None:
    found = fingerprint()
    assert list(found) == ["python", "torch", "numpy", "tutti", "code"]
    assert found["tutti"] == tutti.__version__
    assert found["python"] == sys.version.split()[0]
    assert found["code"] == own_code() == digest_of_package(Path(tutti.__file__).parent)


def test_the_digest_of_a_package_depends_on_its_files_and_not_on_its_location(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "inner").mkdir(parents=True)
    (first / "inner" / "a.py").write_text("x = 1\n")
    (first / "notes.txt").write_text("not code\n")
    shutil.copytree(first, second)
    (second / "notes.txt").write_text("other notes\n")
    assert digest_of_package(first) == digest_of_package(second)
    (second / "inner" / "a.py").write_text("x = 2\n")
    assert digest_of_package(first) != digest_of_package(second)
    (second / "inner" / "a.py").rename(second / "inner" / "b.py")
    (second / "inner" / "b.py").write_text("x = 1\n")
    assert digest_of_package(first) != digest_of_package(second)


def test_modules_that_a_recipe_names_are_digested_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doctors_own_parts.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    values = resolve("digits").config.plain()
    values["model"] = {"name": "doctors_own_parts:Network"}
    values["metrics"] = ["doctors_missing_parts.inner:score", "accuracy"]
    found = user_code(resolve_values(values))
    assert found == {"doctors_missing_parts": "missing", "doctors_own_parts": digest_of_module("doctors_own_parts")}
    assert len(found["doctors_own_parts"]) == 12


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("digits", [], []),
        ("mnist", ["data.path=/d/mnist"], ["/d/mnist"]),
        ("cifar10/cnn", ["data.path=cifar", "data.cache=/c"], ["cifar"]),
        ("nbody", ["data.train=a.h5", "data.valid=b.h5", "data.make=false"], ["a.h5", "b.h5"]),
        ("nbody", ["data.make=true"], []),
        ("nbody", ["data.source=synthetic"], []),
    ],
)
def test_the_paths_of_a_recipes_data_are_known_without_opening_it(
    recipe: str, overrides: list[str], expected: list[str]
) -> None:
    assert data_paths(resolve(recipe, overrides).config) == expected


def test_the_state_of_data_shows_what_differs(tmp_path: Path) -> None:
    assert state_of(str(tmp_path / "nothing")) == {"kind": "missing"}
    file = tmp_path / "file"
    file.write_bytes(bytes(300_000))
    first = state_of(str(file))
    assert (first["kind"], first["bytes"]) == ("file", 300_000)
    file.write_bytes(bytes(299_999) + b"x")
    assert state_of(str(file))["digest"] != first["digest"]
    folder = tmp_path / "folder"
    (folder / "class_a").mkdir(parents=True)
    (folder / "class_a" / "1.png").write_bytes(b"12345")
    before = state_of(str(folder))
    assert (before["kind"], before["entries"], before["bytes"]) == ("folder", 2, 5)
    (folder / "class_b").mkdir()
    assert state_of(str(folder))["digest"] != before["digest"]


def test_memory_is_read_as_the_kernel_writes_it(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:       16 kB\nMemFree:        2 kB\nMemAvailable:   8 kB\nHugePages: 0\n"
    )
    assert read_memory(str(tmp_path / "meminfo")) == (8192, 16384)
    assert read_memory(str(tmp_path / "nothing")) == (0, 0)


def test_limits_are_numbers_with_names() -> None:
    assert set(read_limits()) == {"open files", "locked memory", "processes"}
    assert read_limits()["open files"] != 0
