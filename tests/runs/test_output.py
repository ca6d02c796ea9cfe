"""What ranks print: every rank into its log, rank 0 on the screen as well, and all as it was afterwards."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti.runs.folder import RunFolder
from tutti.runs.output import Tee, captured_output, last_lines, lasting_output

Screen = pytest.CaptureFixture[str]


def speak() -> None:
    """Everything a rank may print with."""
    print("python out")
    print("python err", file=sys.stderr)
    sys.stdout.flush()
    os.write(1, b"c out\n")
    os.write(2, b"c err\n")


def state() -> tuple[object, ...]:
    """The streams, what the descriptors behind them are, and how many files are open."""
    return sys.stdout, sys.stderr, os.fstat(1).st_ino, os.fstat(2).st_ino, len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def captured(path: Path, on_screen: bool, prefix: str = "") -> Iterator[None]:
    """captured_output, after which all is as before."""
    before = state()
    try:
        with captured_output(path, on_screen, prefix):
            yield
    finally:
        assert state() == before


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank.log"


def test_rank_0_prints_on_the_screen_and_into_its_log(capfd: Screen, log: Path) -> None:
    with captured(log, on_screen=True):
        print("python out")
        print("python err", file=sys.stderr)
        print("no line yet", end="")
    print("after")
    shown = capfd.readouterr()
    assert shown.out == "python out\nno line yetafter\n"
    assert shown.err == "python err\n"
    assert log.read_text() == "python out\npython err\nno line yet"


def test_what_c_prints_on_rank_0_reaches_the_screen(capfd: Screen, log: Path) -> None:
    with captured(log, on_screen=True):
        speak()
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("python out\nc out\n", "python err\nc err\n")


def test_other_ranks_print_into_their_log_alone_from_python_and_from_c(capfd: Screen, log: Path) -> None:
    with captured(log, on_screen=False):
        speak()
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert log.read_text().splitlines() == ["python out", "python err", "c out", "c err"]


@pytest.mark.parametrize("on_screen", [True, False])
def test_everything_is_as_before_after_an_error_too(capfd: Screen, log: Path, on_screen: bool) -> None:
    with pytest.raises(ValueError, match="oops"), captured(log, on_screen=on_screen):
        raise ValueError("oops")
    speak()
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("python out\nc out\n", "python err\nc err\n")
    assert log.read_text() == ""


@pytest.mark.parametrize("on_screen", [True, False])
def test_a_log_is_continued_and_can_be_read_line_by_line(capfd: Screen, log: Path, on_screen: bool) -> None:
    log.write_text("earlier\n")
    with captured(log, on_screen=on_screen):
        print("now")
        assert log.read_text() == "earlier\nnow\n"
    capfd.readouterr()


def test_a_log_that_cannot_be_opened_leaves_the_streams_alone(capfd: Screen, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), captured(tmp_path / "absent" / "log", on_screen=True):
        pass
    speak()
    assert capfd.readouterr().out == "python out\nc out\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_does_not_silence_the_screen(capfd: Screen) -> None:
    with open("/dev/full", "w", buffering=1) as log:
        tee = Tee(sys.stdout, log)
        for _ in range(3):
            print("still here", file=tee, flush=True)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), log.fileno())  # what is left can then be let go
    assert capfd.readouterr().out == "still here\n" * 3


def test_output_goes_on_when_its_reader_has_left(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with lasting_output():
            print("nobody reads this", flush=True)
            with captured_output(log, on_screen=True):
                print("nor this, but in the log", flush=True)
            print("still here", flush=True)
        assert sys.stdout is pipe
        print("written when the file is closed")
    assert log.read_text() == "nor this, but in the log\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_continues_when_the_screen_is_a_file_on_a_full_disk(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with lasting_output():
            with captured_output(log, on_screen=True):
                print("in the log", flush=True)
            print("still here", flush=True)
        print("written when the file is closed")
    assert log.read_text() == "in the log\n"


def test_a_stream_is_a_terminal_only_where_there_is_a_screen(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        alone = Tee(None, log)
        assert not alone.isatty() and alone.fileno() == log.fileno()
        assert alone.write("text") == 4
    assert (tmp_path / "log").read_text() == "text"


def test_the_end_of_a_log_is_quoted_whatever_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(30)) + b"\xff torn")
    assert last_lines(path, 3) == ["line 28", "line 29", "\ufffd torn"]
    assert last_lines(path, 1) == last_lines(path)[-1:]
    assert last_lines(tmp_path / "absent") == []


def test_ranks_of_a_large_job_share_the_log_of_their_node(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    assert folder.shared_log(0, 4096, 0) == (folder.log(0), "")
    assert folder.shared_log(255, 256, 31) == (folder.log(255), "")
    for rank in (8, 9):
        path, prefix = folder.shared_log(rank, 257, 1)
        with captured(path, on_screen=False, prefix=prefix):
            print("one", "two\nthree", end="")
            print(" and more")
    assert (folder.logs / "node-1.log").read_text() == "".join(
        f"[rank {rank}] one two\n[rank {rank}] three and more\n" for rank in (8, 9)
    )
