"""ladder.png: what was tried to make a recipe faster, and what helped."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tutti.bench.greedy_search import TriedChange

_KEPT, _NOT_KEPT = "#0072B2", "#BBBBBB"


def draw_ladder(rungs: Sequence[TriedChange], recipe: str, path: Path) -> Path:
    """A bar for each rung, from the top down, with the middle half of its trials; those that failed have none."""
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rungs) + 1.4), layout="constrained")
    most = max((rung.after.quartiles[1] for rung in rungs if rung.after), default=1.0) or 1.0
    for place, rung in enumerate(rungs):
        speed = rung.after.median if rung.after else 0.0
        axes.barh(place, speed, color=_KEPT if rung.kept else _NOT_KEPT, hatch="" if rung.kept else "//")
        low, high = rung.after.quartiles if rung.after else (0.0, 0.0)
        if rung.after:
            axes.plot([low, high], [place, place], color="black", lw=1.2, marker="|", ms=6)
        words = [f"{rung.gain:.2f} x" if rung.gain else "", rung.outcome if len(rung.outcome) < 40 else "failed"]
        axes.annotate("  " + "  ".join(filter(None, words)), (max(speed, high), place), va="center", fontsize=8)
    axes.set_yticks(range(len(rungs)), [rung.name for rung in rungs], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * most)
    axes.set(xlabel="samples/s of all ranks", title=f"{recipe}: each rung on top of those kept")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
