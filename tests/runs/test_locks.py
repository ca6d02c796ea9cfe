"""A run folder has one owner, whose lock ends with it, and changes of job.json are not lost."""

import json
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tutti.errors import FolderError
from tutti.runs import folder as locks
from tutti.runs.folder import RunFolder, owned
from tutti.runs.jobs import JobRecord, changed_job, read_job

HOLDER = """
import sys
from pathlib import Path
from tutti.runs.folder import RunFolder
from tutti.runs.folder import owned
with owned(RunFolder(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def owner_elsewhere(folder: Path) -> Path:
    """The file of an owner on another host, which does not hold a lock that this host sees."""
    path = folder / "owner.json"
    owner = {"host": "another", "process": 4242, "process_start": "1", "since": "2026-11-15T10:15:00+00:00"}
    path.write_text(json.dumps(owner))
    return path


def test_a_second_owner_is_refused_and_told_who_is_the_first(tmp_path: Path) -> None:
    with owned(RunFolder(tmp_path)):
        with pytest.raises(FolderError) as refused, owned(RunFolder(tmp_path)):
            pass
        text = str(refused.value)
        assert text.startswith(f"{tmp_path} is in use by process {os.getpid()} on host {platform.node()}, since 20")
        assert refused.value.exit_code == 2
    with owned(RunFolder(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
def test_the_lock_of_a_killed_owner_is_free(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(FolderError, match=f"in use by process {holder.pid} "), owned(RunFolder(tmp_path)):
        pass
    holder.kill()
    holder.communicate()
    with owned(RunFolder(tmp_path)):
        assert json.loads((tmp_path / "owner.json").read_text())["process"] == os.getpid()


def test_an_owner_on_another_host_without_a_heartbeat_has_lost_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner_elsewhere(tmp_path)
    monkeypatch.setattr(locks, "WATCH_SECONDS", 0.2)
    with owned(RunFolder(tmp_path), watch_seconds=0.2):
        assert json.loads((tmp_path / "owner.json").read_text())["host"] == platform.node()


def test_an_owner_on_another_host_that_lives_keeps_the_folder(tmp_path: Path) -> None:
    path, over = owner_elsewhere(tmp_path), threading.Event()

    def live() -> None:
        number = 0
        while not over.wait(0.01):
            number += 1
            os.utime(path, (number, number))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with (
            pytest.raises(FolderError, match="in use by process 4242 on host another, since 2026-11-15T10:15"),
            owned(RunFolder(tmp_path), watch_seconds=600),
        ):
            pass
    finally:
        over.set()
        thread.join()


def test_changes_of_a_job_by_several_at_once_are_all_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    JobRecord("slurm", "slurm", "digits", {}, max_requeues=2, script="job.sh").write(folder)

    def add(name: str) -> None:
        for number in range(20):
            with changed_job(folder) as job:
                job.ids.append(f"{name}{number}")

    threads = [threading.Thread(target=add, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_job(folder).ids) == sorted(f"{name}{number}" for name in "abc" for number in range(20))


def test_where_the_file_system_has_no_locks_a_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_lock", lambda *_: None)
    test_changes_of_a_job_by_several_at_once_are_all_kept(tmp_path)
    with owned(RunFolder(tmp_path)), pytest.raises(FolderError, match=r"in use by"), owned(RunFolder(tmp_path)):
        pass
