"""The ladder of a recipe is drawn, whatever became of its rungs."""

from pathlib import Path

from made_up import made_up

from tutti.bench.greedy_search import GreedySearch
from tutti.report.bench import draw_ladder


def test_rungs_that_were_kept_or_not_or_failed_are_drawn(tmp_path: Path) -> None:
    slow = made_up(data=0.7, computing=0.3, batches_are_samples=True)
    ladder = GreedySearch(slow)
    for found in (slow, "out of memory", made_up("data.workers=2", computing=0.3)):
        chosen = ladder.next()
        assert chosen is not None
        ladder.note(chosen, found)
    path = draw_ladder(ladder.tried, "digits", tmp_path / "ladder.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_ladder_without_any_speed_is_drawn(tmp_path: Path) -> None:
    assert draw_ladder(GreedySearch(made_up()).tried, "digits", tmp_path / "ladder.png").exists()
