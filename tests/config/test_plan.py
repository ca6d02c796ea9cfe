"""A global batch on a number of ranks: the arithmetic, and fixes in its errors that work when applied."""

import re
from collections.abc import Iterator

import pytest

from tutti.config.load import resolve_values
from tutti.config.plan import Plan, make_plan
from tutti.config.run import RunConfig
from tutti.errors import ConfigError


def config(**batch: int | None) -> RunConfig:
    return resolve_values(
        {
            "data": {"name": "synthetic"},
            "model": {"name": "mlp"},
            "optim": {"name": "sgd", "lr": 0.1},
            "batch": batch,
            "epochs": 3,
        }
    )


def plan(batch: dict[str, int | None], ranks: int, samples: int = 10_000) -> Plan:
    return make_plan(config(**batch), ranks, samples)


def refusal(batch: dict[str, int | None], ranks: int, samples: int = 10_000) -> str | None:
    try:
        plan(batch, ranks, samples)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("batch", "ranks", "samples", "found"),
    [
        ({"global": 64}, 1, 1437, (64, 64, 64, 1, 22, 66)),
        ({"global": 64}, 4, 1437, (64, 16, 16, 1, 22, 66)),
        ({"global": 64, "micro": 16}, 1, 1437, (64, 64, 16, 4, 22, 66)),
        ({"global": 64, "micro": 16}, 4, 1437, (64, 16, 16, 1, 22, 66)),
        ({"per_rank": 64}, 1, 60_000, (64, 64, 64, 1, 937, 2811)),
        ({"per_rank": 64}, 3, 60_000, (192, 64, 64, 1, 312, 936)),
        ({"per_rank": 64, "micro": 8}, 2, 60_000, (128, 64, 8, 8, 468, 1404)),
        ({"global": 10}, 10, 10, (10, 1, 1, 1, 1, 3)),
    ],
)
def test_a_batch_splits_over_ranks_and_passes(
    batch: dict[str, int | None], ranks: int, samples: int, found: tuple[int, ...]
) -> None:
    made = plan(batch, ranks, samples)
    sizes = (made.global_batch, made.per_rank_batch, made.micro_batch, made.passes)
    assert (*sizes, made.steps_per_epoch, made.total_steps) == found
    assert made.world_size == ranks


@pytest.mark.parametrize(
    ("batch", "ranks", "samples", "message"),
    [
        (
            {"global": 64},
            3,
            1000,
            "batch.global=64 does not split over 3 ranks: expected a multiple of 3. "
            "Set batch.global=63, or start a number of ranks that divides 64.",
        ),
        (
            {"global": 64, "micro": 16},
            3,
            1000,
            "batch.global=64 does not split over 3 ranks of micro-batches of 16: expected a multiple of 48. "
            "Set batch.global=48, or start a number of ranks that divides 4.",
        ),
        (
            {"global": 2},
            8,
            1000,
            "batch.global=2 does not split over 8 ranks: expected a multiple of 8. "
            "Set batch.global=8, or start a number of ranks that divides 2.",
        ),
        (
            {"global": 50, "micro": 16},
            1,
            1000,
            "batch.global=50 does not split over 1 rank of micro-batches of 16: expected a multiple of 16. "
            "Set batch.global=48.",
        ),
        (
            {"per_rank": 10, "micro": 4},
            2,
            1000,
            "batch.micro=4 does not divide the 10 samples of a rank: expected a divisor of 10. "
            "Set batch.micro=5, or change batch.per_rank.",
        ),
        (
            {"per_rank": 64},
            4,
            100,
            "a global batch of 256 is larger than the 100 training samples of 'synthetic': there would be no step. "
            "Set batch.global=100 or less.",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_a_fix(
    batch: dict[str, int | None], ranks: int, samples: int, message: str
) -> None:
    assert refusal(batch, ranks, samples) == message


def unsplittable() -> Iterator[tuple[dict[str, int | None], int, str]]:
    """Small global batches that do not split, each with its message."""
    for size in range(1, 33):
        for micro in (None, 1, 2, 3, 4, 5, 8):
            for ranks in range(1, 9):
                batch: dict[str, int | None] = {"global": size, "micro": micro}
                if message := refusal(batch, ranks):
                    yield batch, ranks, message


def test_the_batch_that_is_advised_splits_and_is_the_nearest_that_does() -> None:
    cases = list(unsplittable())
    assert len(cases) > 100
    for batch, ranks, message in cases:
        advised = int(re.findall(r"Set batch\.global=(\d+)", message)[0])
        assert refusal(batch | {"global": advised}, ranks) is None, message
        wish = batch["global"] or 0
        nearer = range(max(1, wish - abs(advised - wish) + 1), wish + abs(advised - wish))
        assert all(refusal(batch | {"global": size}, ranks) for size in nearer), message


def test_the_numbers_of_ranks_that_are_advised_split_the_batch() -> None:
    for batch, _, message in unsplittable():
        for number in map(int, re.findall(r"a number of ranks that divides (\d+)", message)):
            for ranks in (r for r in range(1, number + 1) if number % r == 0):
                assert refusal(batch, ranks) is None, f"{message} (tried {ranks} ranks)"


def test_the_micro_batch_that_is_advised_divides_the_samples_of_a_rank() -> None:
    tried = 0
    for per_rank in range(1, 25):
        for micro in range(1, 30):
            if message := refusal({"per_rank": per_rank, "micro": micro}, 2):
                tried += 1
                advised = int(re.findall(r"Set batch\.micro=(\d+)", message)[0])
                made = plan({"per_rank": per_rank, "micro": advised}, 2)
                assert made.passes * made.micro_batch == per_rank
    assert tried > 100


def test_the_batch_that_is_advised_for_few_samples_gives_a_step() -> None:
    for samples in (16, 17, 19, 100):
        for ranks in (1, 2, 3, 4):
            for micro in (None, 2):
                message = refusal({"per_rank": 128, "micro": micro}, ranks, samples) or ""
                advised = int(re.findall(r"Set batch\.global=(\d+) or less", message)[0])
                batch: dict[str, int | None] = {"global": advised, "micro": micro}
                assert refusal(batch, ranks, samples) is None, f"{ranks} rank(s), batch.micro={micro}: {message}"
