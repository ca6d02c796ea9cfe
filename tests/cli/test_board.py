"""`tutti board`: TensorBoard shows runs under short names, adds new ones, and ends with the command."""

import json
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from conftest import environment
from prepared import PYTHON
from rank_jobs import reserved_port
from run_folders import make_run
from waiting import wait_for_end, wait_until

from tutti.cli.board import _wait_for_address, board
from tutti.errors import FolderError, LaunchError
from tutti.launch.supervisor import LocalProcess
from tutti.runs.tensorboard import TensorBoardLog


def make_shown(path: Path) -> None:
    """A run with one point of a curve."""
    log = TensorBoardLog(make_run(path).tensorboard)
    log.write({"event": "step", "step": 1, "loss": 1.0, "time": 1.0})
    log.close()


def test_a_dry_run_prints_the_names_and_the_command_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "digits" / "2026-11-15_101500_n2").tensorboard.mkdir()
    with reserved_port() as port:
        board(tmp_path, port, dry_run=True)
    name, line = capsys.readouterr().out.splitlines()
    assert name == "digits_2026-11-15_101500_n2"
    assert re.search(r" -m tensorboard\.main --logdir \S+/\.board --host localhost --port \d+$", line)
    assert not (tmp_path / ".board").exists()


def test_no_port_is_chosen_before_tensorboard_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "digits" / "2026-11-15_101500_n2").tensorboard.mkdir()
    board(tmp_path, None, dry_run=True)
    assert capsys.readouterr().out.splitlines()[1].endswith("/.board --host localhost")


def test_another_host_is_passed_on_and_an_unknown_one_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "digits" / "2026-11-15_101500_n2").tensorboard.mkdir()
    board(tmp_path, None, "0.0.0.0", dry_run=True)
    assert capsys.readouterr().out.splitlines()[1].endswith("--host 0.0.0.0")
    with pytest.raises(LaunchError, match=r"--host no\.such\.name\.invalid: .* Expected localhost"):
        board(tmp_path, None, "no.such.name.invalid", dry_run=True)


class FakeProcess:
    """A TensorBoard that has printed something, and runs or has ended."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code


def test_only_tensorboard_itself_says_where_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("NOTE: a note\nTensorBoard 2.20.0 at http://localhost:6007/ (Press CTRL+C to quit)\n")
    assert _wait_for_address(cast(LocalProcess, FakeProcess(None)), log) == "http://localhost:6007/"
    log.write_text("ERROR: TensorBoard could not bind to port 6006, it was already in use\n")
    with pytest.raises(LaunchError, match="did not start: ERROR: TensorBoard could not bind to port 6006, it was"):
        _wait_for_address(cast(LocalProcess, FakeProcess(1)), log)


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="absent: no such folder of runs"):
        board(tmp_path / "absent", None, dry_run=True)
    with pytest.raises(
        FolderError, match=r"holds no run with TensorBoard's events: train one with log\.tensorboard=true"
    ):
        board(tmp_path, None, dry_run=True)
    make_run(tmp_path / "run").tensorboard.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--port {port} is taken by another program: choose another, or leave"):
            board(tmp_path, port, dry_run=True)
    with pytest.raises(LaunchError, match="--port 70000: expected a number from 1 to 65535"):
        board(tmp_path, 70000, dry_run=True)
    (tmp_path / ".board").touch()
    with (
        reserved_port() as port,
        pytest.raises(FolderError, match=r"\.board: cannot create links to the runs there: File exists"),
    ):
        board(tmp_path, port, dry_run=False)


@pytest.mark.system
@pytest.mark.slow
def test_tensorboard_lists_runs_by_their_names_also_new_ones_and_ends_on_an_interrupt(tmp_path: Path) -> None:
    make_shown(tmp_path / "runs" / "digits" / "2026-11-15_101500_n2")
    with reserved_port() as port, started(tmp_path, port) as process:
        assert process.stdout is not None
        address = process.stdout.readline()
        assert address == f"1 run of runs: http://localhost:{port}/ (Ctrl-C ends it)\n"
        await_runs(port, ["digits_2026-11-15_101500_n2"])
        make_shown(tmp_path / "runs" / "digits" / "2026-11-15_101600_n4")
        await_runs(port, ["digits_2026-11-15_101500_n2", "digits_2026-11-15_101600_n4"])
        process.send_signal(signal.SIGINT)
        assert wait_for_end(process, lambda: "tutti board does not end") == 0
        assert process.stdout.read() == ""


@contextmanager
def started(cwd: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    words = [PYTHON, "-m", "tutti", "board", "--port", str(port)]
    with subprocess.Popen(words, cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def await_runs(port: int, expected: list[str]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def listed() -> list[str]:
        with opener.open(f"http://127.0.0.1:{port}/data/runs") as answer:
            return sorted(json.load(answer))

    wait_until(lambda: listed() == expected, lambda: f"TensorBoard lists {listed()}, not {expected}")
