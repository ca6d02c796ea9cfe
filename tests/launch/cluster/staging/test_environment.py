"""What an environment consists of, by made-up answers of interpreters, and the files of its layers."""

import os
from pathlib import Path
from typing import Any

import pytest
from small_environment import BASE_STAYS, make_environment

from tutti.errors import LaunchError
from tutti.launch.cluster.staging.environment import EnvironmentLayer, describe, files_of, find_environment

LIBRARY, PACKAGES = "lib/python3.11", "lib/python3.11/site-packages"


def answer(prefix: Path, base: Path, *path: Path, **more: Any) -> dict[str, Any]:
    """What the interpreter of a prefix says; `path` is behind its packages."""
    for each in (prefix, base):
        (each / PACKAGES).mkdir(parents=True, exist_ok=True)
    packages = str(prefix / PACKAGES)
    found = {
        "prefix": str(prefix),
        "base": str(base),
        "python": str(base / "bin" / "python3.11"),
        "stdlib": [str(base / LIBRARY)],
        "purelib": packages,
        "sites": [packages],
        "library": [1, str(base / "lib"), "libpython3.11.so.1.0"],
        "path": [str(base / "lib" / "python311.zip"), str(base / LIBRARY), packages, *map(str, path)],
        "editable": {},
    }
    return found | more


def names(layer: EnvironmentLayer) -> set[str]:
    return {file.name for file in files_of(layer)}


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_virtual_environment_moves_with_the_library_of_its_base(tmp_path: Path) -> None:
    venv, base = tmp_path / "venv", tmp_path / "python"
    touch(
        venv / "bin" / "python",
        venv / "runs" / "large",
        venv / PACKAGES / "torch" / "__init__.py",
        base / PACKAGES / "pip.py",
    )
    touch(base / "bin" / "python3.11", base / LIBRARY / "os.py", base / LIBRARY / "test" / "test_os.py")
    touch(base / "lib" / "libpython3.11.so.1.0", base / "lib" / "libpython3.11.a")
    found = describe(answer(venv, base))
    assert [(layer.name, layer.source) for layer in found.layers] == [("prefix", venv), ("base", base)]
    assert (found.python, found.is_virtual, found.system_sites) == ("base/bin/python3.11", True, False)
    prefix, below = found.layers
    assert names(prefix) == {f"{PACKAGES}/torch/__init__.py"}
    assert names(below) == {"bin/python3.11", f"{LIBRARY}/os.py", "lib/libpython3.11.so.1.0"}
    assert found.library == "base/lib/libpython3.11.so.1.0"


def test_packages_of_a_base_that_the_environment_sees_move_with_it(tmp_path: Path) -> None:
    venv, base = tmp_path / "venv", tmp_path / "conda"
    touch(base / PACKAGES / "torch.py")
    sites = [str(venv / PACKAGES), str(base / PACKAGES)]
    found = describe(answer(venv, base, base / PACKAGES, sites=sites))
    assert found.system_sites and found.after == ()
    assert f"{PACKAGES}/torch.py" in names(found.layers[1])


def test_a_prefix_without_a_base_moves_whole_but_for_other_environments(tmp_path: Path) -> None:
    conda = tmp_path / "conda"
    touch(conda / "bin" / "python3.11", conda / "lib" / "libc++.so", conda / "envs" / "other" / "bin" / "python")
    found = describe(answer(conda, conda))
    assert [layer.name for layer in found.layers] == ["prefix"]
    assert (found.python, found.is_virtual) == ("prefix/bin/python3.11", False)
    assert names(found.layers[0]) == {"bin/python3.11", "lib/libc++.so"}


def test_the_python_of_the_system_is_on_every_node_and_what_is_beside_it_moves(tmp_path: Path) -> None:
    touch(tmp_path / "site-packages" / "torch.py")
    system = answer(tmp_path, tmp_path) | {"prefix": "/usr", "base": "/usr", "python": "/usr/bin/env"}
    system |= {"stdlib": ["/usr/lib/python3.11"], "purelib": "/usr/lib/python3/dist-packages", "sites": []}
    found = describe(system | {"path": ["/usr/lib/python3.11", str(tmp_path / "site-packages")]})
    assert [layer.name for layer in found.layers] == ["path-0"]
    assert found.is_virtual and found.python == os.path.realpath("/usr/bin/env") and found.before == ("path-0",)
    assert found.site_packages == PACKAGES


def test_of_a_folder_of_sources_only_what_can_be_imported_moves(tmp_path: Path) -> None:
    sources = tmp_path / "project"
    touch(sources / "package" / "__init__.py", sources / "package" / "table.json", sources / "module.py")
    touch(sources / "runs" / "one" / "metrics.jsonl", sources / ".git" / "hook.py", sources / "README.md")
    touch(sources / ".venv" / "pyvenv.cfg", sources / "env" / "pyvenv.cfg", sources / "env" / "a.py")
    found = describe(answer(tmp_path / "venv", tmp_path / "python", sources))
    assert found.after == ("path-0",) and found.shared == {str(sources): "path-0"}
    assert names(found.layers[-1]) == {"package/__init__.py", "package/table.json", "module.py"}


def test_the_order_of_the_path_is_kept(tmp_path: Path) -> None:
    first, user, inside = tmp_path / "first", tmp_path / "site-packages", tmp_path / "venv" / PACKAGES / "inside"
    touch(tmp_path / "own.zip", first / "a.py", user / "b.py", inside / "c.py")
    given = answer(tmp_path / "venv", tmp_path / "python", inside, user)
    given["path"] = [str(first), str(tmp_path / "missing"), str(tmp_path / "own.zip"), *given["path"]]
    found = describe(given)
    assert found.before == ("path-0", "path-1/own.zip")
    assert found.after == (f"prefix/{PACKAGES}/inside", "path-3"), "what a layer already has is not packed twice"


def test_packages_that_an_import_hook_finds_move_under_their_names(tmp_path: Path) -> None:
    touch(tmp_path / "src" / "mine" / "__init__.py", tmp_path / "one.py")
    editable = {"own": str(tmp_path / "src" / "mine"), "one": str(tmp_path / "one.py")}
    found = describe(answer(tmp_path / "venv", tmp_path / "python", editable=editable))
    assert [layer.name for layer in found.layers[2:]] == ["path-0/own", "path-1"]
    assert found.after == ("path-0", "path-1")
    assert names(found.layers[-1]) == {"one.py"}


def test_links_within_a_layer_stay_links_and_others_become_files(tmp_path: Path) -> None:
    layer, store = tmp_path / "layer", tmp_path / "store"
    touch(layer / "lib" / "a.so.1", store / "package" / "b.py")
    (layer / "lib" / "a.so").symlink_to(layer / "lib" / "a.so.1")
    (layer / "lib64").symlink_to("lib")
    (layer / "lib" / "package").symlink_to(store / "package")
    (layer / "loop").symlink_to(tmp_path)
    (layer / "nowhere").symlink_to(tmp_path / "missing")
    found = {file.name: file.link for file in files_of(EnvironmentLayer("prefix", layer))}
    kept = {"lib/a.so.1": None, "lib/a.so": "a.so.1", "lib64": "lib", "lib/package/b.py": None}
    assert found == kept | {"loop/store/package/b.py": None}


@pytest.mark.system
def test_a_real_interpreter_says_what_it_imports_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = find_environment(str(make_environment(tmp_path)))
    assert [layer.name for layer in found.layers] == ["prefix", *([] if BASE_STAYS else ["base"]), "path-0"]
    assert found.after == ("path-0",) and found.is_virtual
    assert names(found.layers[-1]) == {"neighbour.py"}


@pytest.mark.system
def test_an_interpreter_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(
        LaunchError, match=r"/bin/true does not say what it imports from .* without --stage-environment"
    ):
        find_environment("/bin/true")
