"""The board holds a link to the events of every run, by its short name, and nothing else."""

from pathlib import Path

from run_folders import make_run

from tutti.runs.listing import find_events, link_events


def links_of(board: Path) -> dict[str, Path]:
    return {str(path.relative_to(board)): path.resolve() for path in board.rglob("*") if path.is_symlink()}


def test_links_lead_to_the_events_of_runs_that_write_them(tmp_path: Path) -> None:
    shown = make_run(tmp_path / "digits" / "2026-11-15_101500_n2")
    large = make_run(tmp_path / "mnist" / "large_batch" / "2026-11-15_101501_n4", recipe="mnist/large_batch")
    make_run(tmp_path / "digits" / "without")
    for run in (shown, large):
        run.tensorboard.mkdir()
    link_events(tmp_path / ".board", find_events(tmp_path))
    assert links_of(tmp_path / ".board") == {
        "digits_2026-11-15_101500_n2": shown.tensorboard.resolve(),
        "mnist/large_batch_2026-11-15_101501_n4": large.tensorboard.resolve(),
    }
    (shown.tensorboard / "events.new").touch()
    assert (tmp_path / ".board" / "digits_2026-11-15_101500_n2" / "events.new").exists()
    assert find_events(tmp_path).keys() == links_of(tmp_path / ".board").keys()  # links are no runs


def test_links_follow_what_is_there_and_stay_when_the_runs_are_moved(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    first, second = (make_run(out / "digits" / name) for name in ("first", "second"))
    for run in (first, second):
        run.tensorboard.mkdir()
    board = out / ".board"
    link_events(board, {"digits_first": first.tensorboard, "old": second.tensorboard})
    kept = (board / "digits_first").lstat().st_ino
    link_events(board, find_events(out))
    assert links_of(board).keys() == {"digits_first", "digits_second"}
    assert (board / "digits_first").lstat().st_ino == kept
    moved = out.rename(tmp_path / "moved")
    assert links_of(moved / ".board")["digits_first"] == moved / "digits" / "first" / "tensorboard"
