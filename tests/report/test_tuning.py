"""The changes that tutti tune tried are drawn: kept, rejected and failed ones."""

from pathlib import Path

from made_up import made_up

from tutti.bench.greedy_search import GreedySearch
from tutti.report.bench import draw_tuning


def test_changes_that_were_kept_rejected_or_failed_are_drawn(tmp_path: Path) -> None:
    slow = made_up(data=0.7, computing=0.3, batches_are_samples=True)
    search = GreedySearch(slow)
    for found in (slow, "out of memory", made_up("data.workers=2", computing=0.3)):
        chosen = search.next()
        assert chosen is not None
        search.note(chosen, found)
    path = draw_tuning(search.tried, "digits", tmp_path / "tune.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_changes_without_a_measured_speed_are_drawn(tmp_path: Path) -> None:
    assert draw_tuning(GreedySearch(made_up()).tried, "digits", tmp_path / "tune.png").exists()
