"""Archives of small environments: packed once, anew where they have changed, and never half."""

import fcntl
import os
import tarfile
import threading
import time
from pathlib import Path

import pytest

from tutti.errors import LaunchError
from tutti.launch.cluster.staging.archive import Packed, pack
from tutti.launch.cluster.staging.environment import Environment, EnvironmentLayer


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """A prefix and a folder of sources."""
    for name in ("prefix/lib/torch.py", "sources/tutti.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    layers = (EnvironmentLayer("prefix", tmp_path / "prefix"), EnvironmentLayer("path-0", tmp_path / "sources"))
    return Environment(layers, "/usr/bin/python3", None, True, False, "lib/python3.11/site-packages", after=("path-0",))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def archives(packed: Packed) -> list[str]:
    return [archive.name for archive in packed.archives]


def test_an_unchanged_environment_is_packed_once(environment: Environment, cache: Path) -> None:
    first, second = pack(environment, cache), pack(environment, cache)
    assert first.packed_now == ("prefix", "path-0") and second.packed_now == ()
    assert (second.digest, second.archives) == (first.digest, first.archives)
    assert sorted(path.name for path in cache.glob("*.tar")) == sorted(archives(first))
    assert not list(cache.glob(".*")), "no lock and no part is left"
    assert cache.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("change", ["content", "time", "name"])
def test_a_changed_layer_is_packed_anew_and_the_other_is_not(
    environment: Environment, cache: Path, tmp_path: Path, change: str
) -> None:
    first = pack(environment, cache)
    file = tmp_path / "sources" / "tutti.py"
    if change == "content":
        file.write_text("another")
    elif change == "time":
        os.utime(file, (1, 1))
    else:
        file.rename(file.with_name("other.py"))
    second = pack(environment, cache)
    assert second.packed_now == ("path-0",) and second.digest != first.digest
    assert archives(second)[0] == archives(first)[0] and archives(second)[1] != archives(first)[1]


def test_modules_that_python_compiles_are_packed_and_change_nothing(
    environment: Environment, cache: Path, tmp_path: Path
) -> None:
    digest = pack(environment, cache).digest
    compiled = tmp_path / "sources" / "__pycache__" / "tutti.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    assert pack(environment, cache).digest == digest
    again = pack(environment, tmp_path / "other")
    with tarfile.open(tmp_path / "other" / archives(again)[1]) as tar:
        assert f"__pycache__/{compiled.name}" in tar.getnames()


def test_files_that_add_folders_to_the_path_keep_only_what_they_run(
    environment: Environment, cache: Path, tmp_path: Path
) -> None:
    text = f"{tmp_path}\nimport __editable___x_finder; __editable___x_finder.install()\nimport sys; sys.hooked = True\n"
    (tmp_path / "prefix" / "lib" / "a.pth").write_text(text)
    packed = pack(environment, cache)
    with tarfile.open(cache / archives(packed)[0]) as tar:
        content = tar.extractfile("lib/a.pth")
        assert content is not None and content.read() == b"import sys; sys.hooked = True\n"


def test_an_interrupted_pack_leaves_nothing_under_the_final_name(
    environment: Environment, cache: Path, tmp_path: Path
) -> None:
    def lose_a_file(_: str) -> None:
        (tmp_path / "prefix" / "lib" / "torch.py").unlink(missing_ok=True)

    with pytest.raises(LaunchError, match=r"cannot be packed into .*: No such file or directory\. Free space there"):
        pack(environment, cache, lose_a_file)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert pack(environment, cache).packed_now == ("prefix", "path-0")


def test_an_archive_that_was_cut_off_is_packed_anew(environment: Environment, cache: Path) -> None:
    first = pack(environment, cache)
    path = cache / archives(first)[0]
    path.write_bytes(path.read_bytes()[:100])
    (cache / f".{path.name}.n1-1.part").touch()
    assert pack(environment, cache).packed_now == ("prefix",)
    assert path.stat().st_size == first.archives[0].bytes
    assert not list(cache.glob("*.part")), "what a killed pack has left is gone"


def test_of_two_submissions_at_once_one_packs_and_the_other_waits(environment: Environment, cache: Path) -> None:
    second_begins = threading.Event()
    found: list[Packed] = []

    def second() -> None:
        second_begins.set()
        found.append(pack(environment, cache))

    thread = threading.Thread(target=second)

    def hold(_: str) -> None:
        if not thread.is_alive() and not found:
            thread.start()
            second_begins.wait()

    first = pack(environment, cache, hold)
    thread.join()
    assert found[0].archives == first.archives
    assert sorted(first.packed_now + found[0].packed_now) == ["path-0", "prefix"]


def test_archives_that_nobody_uses_are_removed_after_a_month(
    environment: Environment, cache: Path, tmp_path: Path
) -> None:
    first = pack(environment, cache)
    (tmp_path / "sources" / "tutti.py").write_text("another")
    old = time.time() - 31 * 86400
    for name in archives(first):
        os.utime(cache / name, (old, old))
    second = pack(environment, cache)
    assert sorted(path.name for path in cache.glob("*.tar")) == sorted(archives(second))


def test_a_lock_that_another_submission_keeps_is_named(
    environment: Environment, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = archives(pack(environment, cache))[0]
    (cache / name).unlink()
    monkeypatch.setattr("tutti.launch.cluster.staging.archive._LOCK_SECONDS", 0.0)
    with open(cache / f".{name}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match=rf"another submission has held .*{name}.lock for 0 min: .* End it, or"):
            pack(environment, cache)
    assert archives(pack(environment, cache))[0] == name, "packed when the lock is free"
