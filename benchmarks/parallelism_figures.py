"""Draw the figures of docs/kinds-of-parallelism.md; nothing is measured.

What the figures state is computed: the ring is carried out chunk by chunk, and a pipeline is scheduled pass by pass.
"""

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#666666"
RANK_COLOURS = (BLUE, ORANGE)
LAYERS = 4
FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"


def ring_states(ranks: int) -> list[list[list[set[int]]]]:
    """Returns whose gradients each chunk of each rank sums, at the beginning and after each step of a ring."""
    state = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    states = [state]
    for step in range(2 * (ranks - 1)):
        following = [[set(chunk) for chunk in rank] for rank in state]
        for rank in range(ranks):
            chunk = (rank - step) % ranks if step < ranks - 1 else (rank + 1 - (step - ranks + 1)) % ranks
            target = following[(rank + 1) % ranks]
            adds = step < ranks - 1  # reduce-scatter, then all-gather
            target[chunk] = target[chunk] | state[rank][chunk] if adds else set(state[rank][chunk])
        state = following
        states.append(state)
    assert all(chunk == set(range(ranks)) for rank in state for chunk in rank)
    return states


def schedule_passes(stages: int, micro_batches: int) -> tuple[list[tuple[int, int, float, str]], float]:
    """Returns (stage, micro-batch, begin, kind) of each pass of a GPipe schedule, and the idle share.

    A backward pass takes twice the time of a forward pass.
    """
    forward = [
        (stage, micro, float(stage + micro), "forward") for stage in range(stages) for micro in range(micro_batches)
    ]
    begin = float(stages + micro_batches - 1)
    backward = [
        (stage, micro, begin + 2 * (stages - 1 - stage + micro_batches - 1 - micro), "backward")
        for stage in range(stages)
        for micro in reversed(range(micro_batches))
    ]
    passes = forward + backward
    end = max(start + _duration(kind) for _, _, start, kind in passes)
    return passes, 1 - sum(_duration(kind) for *_, kind in passes) / (stages * end)


def draw_kinds(path: Path) -> None:
    """Draws which weights and samples two ranks hold under four kinds of parallelism."""
    figure, panels = _begin(1, 4, (11, 3.9))
    _draw_ranks(panels[0], "data", [("all", "01"), ("all", "23")], "gradients, once a step")
    _draw_ranks(panels[1], "sharded data", [("left", "01"), ("right", "23")], "weights and gradients,\nlayer by layer")
    _draw_ranks(panels[2], "tensor", [("left", "0123"), ("right", "0123")], "activations,\nin every layer")
    _draw_ranks(panels[3], "pipeline", [("lower", "0123"), ("upper", "")], "activations,\nbetween stages")
    figure.savefig(path, dpi=150)


def _draw_ranks(axis: Axes, title: str, ranks: list[tuple[str, str]], travels: str) -> None:
    axis.set_title(title, fontsize=12)
    axis.set_xlim(-0.1, 4.5)
    axis.set_ylim(-1.6, 5.1)
    for rank, (part, samples) in enumerate(ranks):
        x, colour = 2.4 * rank, RANK_COLOURS[rank]
        box = FancyBboxPatch((x, -0.1), 2, 4.4, boxstyle="round,pad=0.05", facecolor="none", edgecolor=colour, lw=1.5)
        axis.add_patch(box)
        axis.text(x + 1, 4.55, f"rank {rank}", ha="center", fontsize=9, color=colour)
        for layer in range(LAYERS):
            y = 1 + 0.8 * layer
            _draw_layer(axis, x + 0.2, y, part, layer, colour, title)
        for place, sample in enumerate(samples):
            left = x + 1 + (place - len(samples) / 2) * 0.42
            axis.add_patch(Rectangle((left, 0.1), 0.36, 0.45, facecolor="#dddddd", edgecolor=GREY))
            axis.text(left + 0.18, 0.31, sample, ha="center", va="center", fontsize=7)
    axis.add_patch(FancyArrowPatch((1.6, -0.5), (2.8, -0.5), arrowstyle="<|-|>", mutation_scale=12, color=GREY))
    axis.text(2.2, -0.7, travels, ha="center", va="top", fontsize=9)


def _draw_layer(axis: Axes, x: float, y: float, part: str, layer: int, colour: str, title: str) -> None:
    width = 1.6
    halves = {"all": (0, 1), "left": (0, 0.5), "right": (0.5, 1), "lower": (0, 1), "upper": (0, 1)}
    begin, end = halves[part]
    if part in ("lower", "upper") and (layer < LAYERS // 2) != (part == "lower"):
        begin, end = 0, 0
    hatch = "////" if title == "sharded data" else None  # the missing part is fetched when it is needed
    axis.add_patch(Rectangle((x, y), width, 0.5, facecolor="none", edgecolor="#bbbbbb", linestyle=":", hatch=hatch))
    if end > begin:
        left = x + begin * width
        axis.add_patch(Rectangle((left, y), (end - begin) * width, 0.5, facecolor=colour, edgecolor=colour))


def draw_pipeline(path: Path) -> None:
    """Draws when four stages compute, with one micro-batch and with eight."""
    figure, panels = _begin(2, 1, (9, 3.6))
    for axis, count in zip(panels, (1, 8), strict=True):
        passes, idle = schedule_passes(4, count)
        for stage, micro, start, kind in passes:
            colour = BLUE if kind == "forward" else GREEN
            width = _duration(kind)
            axis.add_patch(Rectangle((start, 3 - stage), width, 0.9, facecolor=colour, edgecolor="white", alpha=0.85))
            axis.text(start + width / 2, 3.45 - stage, str(micro), ha="center", va="center", color="white", fontsize=7)
        for stage in range(4):
            axis.text(-0.3, 3.45 - stage, f"stage {stage}", ha="right", va="center", fontsize=8)
        axis.set_xlim(-2.5, 33.5)
        axis.set_ylim(0, 4)
        words = "one micro-batch" if count == 1 else f"{count} micro-batches"
        axis.set_title(f"{words}: each stage is idle for {idle:.0%} of the step", fontsize=10, loc="left")
    figure.savefig(path, dpi=150)


def draw_all_reduce(path: Path) -> None:
    """Draws what travels in a ring and to a server, and what each rank of a ring has after each step."""
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 2.4])
    for axis in (left, middle, right):
        axis.axis("off")
    _draw_ring(left)
    _draw_server(middle)
    _draw_states(right, ring_states(4))
    figure.savefig(path, dpi=150)


_CORNERS = ((0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0))


def _draw_ring(axis: Axes) -> None:
    for rank, corner in enumerate(_CORNERS):
        _connect(axis, corner, _CORNERS[(rank + 1) % 4], "-|>")
        _draw_node(axis, corner, f"rank {rank}", BLUE)
    _frame(axis, "ring all-reduce", "each link, each direction:\n2 (n-1)/n of the bytes")


def _draw_server(axis: Axes) -> None:
    for rank, corner in enumerate(_CORNERS):
        _connect(axis, corner, (0.0, 0.0), "<|-|>")
        _draw_node(axis, corner, f"rank {rank}", BLUE)
    _draw_node(axis, (0.0, 0.0), "server", ORANGE)
    _frame(axis, "parameter server", "link of the server, each direction:\nn times the bytes")


def _draw_node(axis: Axes, place: tuple[float, float], text: str, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": colour, "linewidth": 1.5}
    axis.text(*place, text, ha="center", va="center", fontsize=9, bbox=box, zorder=3)


def _connect(axis: Axes, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
    arrow = FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=14, color=GREY, shrinkA=20, shrinkB=20)
    axis.add_patch(arrow)


def _frame(axis: Axes, title: str, below: str) -> None:
    axis.set_title(title, fontsize=12)
    axis.set_xlim(-1.5, 1.5)
    axis.set_ylim(-1.9, 1.4)
    axis.text(0, -1.45, below, ha="center", va="top", fontsize=9)


def _draw_states(axis: Axes, states: list[list[list[set[int]]]]) -> None:
    ranks = len(states[0])
    for step, state in enumerate(states):
        for rank, chunks in enumerate(state):
            for place, chunk in enumerate(chunks):
                x, y = 5 * step + place, 1.6 * (ranks - 1 - rank)
                share = len(chunk) / ranks
                axis.add_patch(Rectangle((x, y), 0.95, 1, facecolor=BLUE, alpha=0.15 + 0.75 * share))
                colour = "white" if share > 0.5 else "black"
                axis.text(x + 0.47, y + 0.5, str(len(chunk)), ha="center", va="center", fontsize=7, color=colour)
        axis.text(5 * step + 2, 1.6 * ranks - 0.3, "begin" if step == 0 else f"step {step}", ha="center", fontsize=8)
    for rank in range(ranks):
        axis.text(-0.4, 1.6 * (ranks - 1 - rank) + 0.5, f"rank {rank}", ha="right", va="center", fontsize=8)
    middle = 5 * (ranks - 1) + 4.5
    axis.plot([middle, middle], [-0.6, 1.6 * ranks + 0.3], color=GREY, linestyle=":")
    axis.text(middle - 0.4, -0.8, "reduce-scatter", ha="right", va="top", fontsize=9)
    axis.text(middle + 0.4, -0.8, "all-gather", ha="left", va="top", fontsize=9)
    axis.set_title("the ring: how many ranks each chunk sums", fontsize=12)
    axis.set_xlim(-4, 5 * len(states))
    axis.set_ylim(-2, 1.6 * ranks + 0.6)


def _duration(kind: str) -> float:
    return 1.0 if kind == "forward" else 2.0


def _begin(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns).flat)
    for axis in panels:
        axis.axis("off")
    return figure, panels


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of docs/kinds-of-parallelism.md.")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of the figures")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    draw_kinds(folder / "parallelism_kinds.png")
    draw_pipeline(folder / "parallelism_pipeline.png")
    draw_all_reduce(folder / "parallelism_all_reduce.png")


if __name__ == "__main__":
    main()
