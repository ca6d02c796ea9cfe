"""The work of ranks in the tests of `tutti tune`, and a dataset with slow samples."""

import json
import os
import sys
import time
from pathlib import Path

import torch

from tutti.bench import tune
from tutti.bench.session import open_session
from tutti.bench.suggestions import Suggestion
from tutti.config.load import resolve
from tutti.ranks.environments import discover

RECIPE = """
data: {name: "tune_work:Sleepy", milliseconds: 25.0}
model: {name: mlp, hidden: [8]}
optim: {name: sgd, lr: 0.01}
batch: {per_rank: 4}
epochs: 1
"""


class Sleepy:
    """Samples that sleep before they are there."""

    input_shape = (4,)
    num_classes = 2

    def __init__(self, split: str, milliseconds: float) -> None:
        self._seconds = milliseconds / 1000

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._seconds)
        return torch.full((4,), float(index % 2)), index % 2


class TwoMeasurements:
    """A budget that allows one change."""

    def __init__(self, seconds: float) -> None:
        self._laps = 0

    def lap(self) -> None:
        self._laps += 1

    @property
    def is_spent(self) -> bool:
        return self._laps >= 2


def tune_once(recipe: str, out: str, write: str) -> None:
    """Tune as the only rank with one change, and print the result."""
    tune.Budget = TwoMeasurements  # pyright: ignore[reportAttributeAccessIssue]
    asked = tune.TuneRequest(recipe, (f"out={out}",), 0.1, (), Path(write))
    shown: list[str] = []
    tuned = tune.tune(asked, discover(os.environ), None, lambda _: None, lambda change: shown.append(change.name))
    last = tuned.search.tried[-1]
    print(json.dumps({"kept": tuned.search.kept, "gain": last.gain, "shown": shown, "folder": str(tuned.folder.path)}))


def fail(recipe: str, out: str, overrides: list[tuple[str, ...]]) -> list[str]:
    """Try what cannot be measured, as this rank."""
    asked = tune.TuneRequest(recipe, (), 1.0, (), None)
    with open_session("tune", resolve(recipe, [f"out={out}"]).config, discover(os.environ)) as session:
        outcomes = [tune._try(session, asked, each, Suggestion(each, "because"), lambda _: None) for each in overrides]
        return [each if isinstance(each, str) else "measured" for each in outcomes]


if __name__ == "__main__":
    tune_once(*sys.argv[1:])
