"""What ranks agree on before a run begins or is resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tutti.checkpoint.manifest import Manifest
from tutti.config.load import load
from tutti.config.plan import make_plan
from tutti.data.order import SampleOrder
from tutti.errors import CheckpointError, ConfigError, TuttiError
from tutti.ranks.group import Group
from tutti.train.build import agreed, check_samples


class Ranks:
    """A group in which other ranks may have an error; notes what this rank tells them."""

    def __init__(self, others: TuttiError | None = None) -> None:
        self.told: list[TuttiError | None] = []
        self._others = others

    def agree(self, error: TuttiError | None) -> None:
        self.told.append(error)
        if found := error or self._others:
            raise found


def test_what_all_ranks_have_built_is_given_back() -> None:
    ranks = Ranks()
    assert agreed(cast(Group, ranks), lambda: "built") == "built"
    assert ranks.told == [None]


def test_a_rank_that_cannot_build_tells_the_others_before_it_ends() -> None:
    ranks, error = Ranks(), ConfigError("no data here")

    def build() -> None:
        raise error

    with pytest.raises(ConfigError, match="no data here"):
        agreed(cast(Group, ranks), build)
    assert ranks.told == [error]


def test_a_rank_that_can_build_ends_with_one_that_cannot() -> None:
    with pytest.raises(ConfigError, match="rank 1 has no data"):
        agreed(cast(Group, Ranks(ConfigError("rank 1 has no data"))), lambda: "built")


CONFIG = load("digits", "seed=7", "batch.global=64", "batch.micro=16", "epochs=2")
PLAN = make_plan(CONFIG, 2, 1437)
ORDER = SampleOrder(PLAN, 7)
SAVED = Manifest("digits", 40, 7, 64, 16, 1437, 4, {}, {})


def test_a_checkpoint_whose_missing_samples_follow_is_accepted() -> None:
    check_samples(Path("c"), SAVED, CONFIG, PLAN, ORDER)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 8}, "checkpoint c was made with seed 8, this run has 7: "),
        ({"global_batch": 32}, "checkpoint c was made with global batch 32, this run has 64: .* Set batch.global=32."),
        ({"micro_batch": None}, "checkpoint c was made with batch.micro None, this run has 16: "),
        ({"train_samples": 1436}, "was made with number of training samples 1436, this run has 1437: "),
        ({"order": "keyed"}, "checkpoint c was made with sample order keyed, this run has stored: "),
        ({"step": 45}, "checkpoint c is at step 45, this run ends at 44."),
    ],
)
def test_a_checkpoint_that_other_samples_would_follow_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_samples(Path("c"), replace(SAVED, **changed), CONFIG, PLAN, ORDER)
