"""What was trained on, from the traces of all ranks: pure functions over what the ranks have written down."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Batch = tuple[int, ...]  # the samples of one step, over all ranks in their order


@dataclass(frozen=True)
class Segment:
    """One start of a run: the samples of its dry run and of each step that all ranks have made, and its weights."""

    label: str
    began: int
    batches: tuple[Batch, ...]
    weights: str | None = None  # a digest of them at its last validation

    @property
    def steps(self) -> int:
        return max(0, len(self.batches) - 1)


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: the samples of every step, its last weights and its losses."""

    batches: tuple[Batch, ...]
    weights: str | None
    losses: dict[tuple[str, int], float]


def read_segments(folder: Path, ranks: int) -> list[Segment]:
    """Return the starts of a run in the order in which they began, from the traces in a folder."""
    starts: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("trace-*.jsonl")):
        lines = read_lines(path)
        if lines and lines[0]["event"] == "start":
            starts.setdefault(lines[0]["start"], {})[lines[0]["rank"]] = lines
    found = [make_segment(label, by_rank, ranks) for label, by_rank in starts.items()]
    return sorted(found, key=lambda segment: segment.began)


def make_segment(label: str, by_rank: dict[int, list[dict[str, Any]]], ranks: int) -> Segment:
    """Join the lines that ranks have written into the steps of one start."""
    began = min(lines[0]["time"] for lines in by_rank.values())
    passes = [[line["ids"] for line in by_rank.get(rank, []) if line["event"] == "train"] for rank in range(ranks)]
    batches = tuple(tuple(sample for part in step for sample in part) for step in zip(*passes, strict=False))
    weights = [line["weights"] for line in by_rank.get(0, []) if line["event"] == "eval"]
    return Segment(label, began, batches, weights[-1] if weights else None)


def check_reference(reference: Reference, samples: int, epochs: int) -> None:
    """Refuse an undisturbed run in which an epoch does not have every sample exactly once."""
    steps = len(reference.batches) // epochs
    for epoch in range(epochs):
        seen = sorted(sample for batch in reference.batches[epoch * steps : (epoch + 1) * steps] for sample in batch)
        if seen != list(range(samples)):
            raise ValueError(f"epoch {epoch + 1} of the undisturbed run does not have every sample once")


def find_mistakes(segments: Sequence[Segment], reference: Reference) -> list[str]:
    """Return where a run, over all its starts, differs from the undisturbed one; empty for an exact ledger.

    A start begins at the step whose samples its dry run has. What it repeats of the start before was lost with
    that one; what it leaves out was never trained on.
    """
    mistakes, done = [], 0
    place = {batch: step for step, batch in enumerate(reference.batches)}
    for segment in segments:
        if not segment.batches:
            continue
        first = place.get(segment.batches[0])
        if first is None:
            mistakes.append(f"start {segment.label}: its first samples are those of no step")
            continue
        if first > done:
            mistakes.append(f"start {segment.label}: steps {done + 1} to {first} were left out")
        for number, batch in enumerate(segment.batches[1:]):
            step = first + number
            if step >= len(reference.batches) or batch != reference.batches[step]:
                mistakes.append(f"start {segment.label}: other samples at step {step + 1}")
                break
        done = first + segment.steps
    if done != len(reference.batches):
        mistakes.append(f"{len(reference.batches) - done} steps are missing at the end")
    weights = [segment.weights for segment in segments if segment.weights is not None]
    if not mistakes and weights and weights[-1] != reference.weights:
        mistakes.append("the last weights are not those of the undisturbed run")
    return mistakes


def compare_losses(
    found: dict[tuple[str, int], float], reference: dict[tuple[str, int], float], may_miss: bool = False
) -> list[str]:
    """Return which losses of metrics.jsonl differ from the undisturbed run's; lost lines may be missing."""
    mistakes = [f"{name} at step {step} is {value}" for (name, step), value in found.items()
                if reference.get((name, step)) != value]  # fmt: skip
    if not may_miss:
        mistakes += [f"{name} at step {step} is missing" for name, step in reference if (name, step) not in found]
    return mistakes


def read_losses(path: Path) -> dict[tuple[str, int], float]:
    """Return every loss of metrics.jsonl by its event and step."""
    events = read_lines(path)
    return {
        (f"{event['event']} {key}", event["step"]): event[key] for event in events for key in event if "loss" in key
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one a line; a line that was cut short is left out."""
    found = []
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
