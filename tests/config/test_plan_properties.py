"""Properties of the batch arithmetic: sizes multiply up, and what an error advises works when it is tried."""

import re

from hypothesis import event, given, settings
from hypothesis import strategies as st
from small_config import small_config

from tutti.config.plan import Plan, make_plan
from tutti.errors import ConfigError

Batch = dict[str, int | None]
SIZES = st.integers(1, 200) | st.integers(1, 10**7)
RANKS = st.integers(1, 8) | st.integers(1, 5000)
MICRO = st.none() | st.integers(1, 64)
LARGE = st.integers(1, 10**30) | st.just(10**400)

repeatable = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def batches(
    draw: st.DrawFn, sizes: st.SearchStrategy[int] = SIZES, micro: st.SearchStrategy[int | None] = MICRO
) -> Batch:
    return {draw(st.sampled_from(["global", "per_rank"])): draw(sizes), "micro": draw(micro)}


def plan(batch: Batch, ranks: int, samples: int, epochs: int = 1, max_steps: int | None = None) -> Plan:
    sizes = type(small_config().batch).model_validate(batch)
    config = small_config().model_copy(update={"batch": sizes, "epochs": epochs, "max_steps": max_steps})
    return make_plan(config, ranks, samples)


def refusal(batch: Batch, ranks: int, samples: int) -> str | None:
    try:
        plan(batch, ranks, samples)
    except ConfigError as error:
        return str(error)
    return None


def advised(message: str, batch: Batch) -> Batch | None:
    """The batch with the first value that a message says to set, or None where it names no value."""
    found = re.search(r"Set batch\.(global|micro)=(\d+)", message)
    if found is None:
        return None
    if found[1] == "global":  # one size takes the place of the other
        return {"global": int(found[2]), "micro": batch["micro"]}
    return batch | {"micro": int(found[2])}


def splits(batch: Batch, ranks: int, samples: int) -> bool:
    """Whether whole micro-batches on all ranks make up the global batch, and the dataset holds one."""
    size = batch["global"] if "global" in batch else (batch["per_rank"] or 0) * ranks
    return size is not None and size % (ranks * (batch["micro"] or 1)) == 0 and size <= samples


@repeatable
@given(
    ranks=RANKS,
    micro=st.integers(1, 64),
    passes=st.integers(1, 16),
    whole=st.integers(1, 50),
    rest=st.floats(0, 1, exclude_max=True),
    epochs=st.integers(1, 1000),
    max_steps=st.none() | st.integers(1, 10_000),
    key=st.sampled_from(["global", "per_rank"]),
    gives_micro=st.booleans(),
)
def test_the_sizes_of_a_plan_multiply_up(
    ranks: int,
    micro: int,
    passes: int,
    whole: int,
    rest: float,
    epochs: int,
    max_steps: int | None,
    key: str,
    gives_micro: bool,
) -> None:
    per_rank = micro * passes
    global_batch = per_rank * ranks
    samples = whole * global_batch + int(rest * global_batch)
    sizes: Batch = {key: global_batch if key == "global" else per_rank, "micro": micro if gives_micro else None}
    made = plan(sizes, ranks, samples, epochs, max_steps)
    assert made.world_size == ranks and made.train_samples == samples and made.epochs == epochs
    assert made.global_batch == made.world_size * made.per_rank_batch == global_batch
    assert made.per_rank_batch == made.micro_batch * made.passes == per_rank
    assert made.micro_batch == (micro if gives_micro else per_rank)
    assert made.steps_per_epoch == whole
    assert made.total_steps == min(epochs * whole, epochs * whole if max_steps is None else max_steps)


@repeatable
@given(batches(), RANKS, SIZES)
def test_a_batch_is_refused_exactly_when_it_does_not_split(batch: Batch, ranks: int, samples: int) -> None:
    message = refusal(batch, ranks, samples)
    event("refused" if message else "splits")
    assert (message is None) == splits(batch, ranks, samples)


@repeatable
@given(batches(), RANKS, SIZES)
def test_the_batch_that_is_advised_works(batch: Batch, ranks: int, samples: int) -> None:
    message = refusal(batch, ranks, samples)
    if message is None:
        return
    advice = advised(message, batch)
    event(f"advice: {advice is not None}")
    if advice is None:  # not one micro-batch for each rank
        assert samples < ranks * (batch["micro"] or 1)
        assert re.search(r"Start (fewer ranks, or lower batch.micro|a number of ranks that divides \d+)\.", message)
    else:
        assert refusal(advice, ranks, samples) is None, f"{message} Tried {advice}."


@repeatable
@given(st.integers(1, 500), RANKS, MICRO)
def test_the_global_batch_that_is_advised_is_a_nearest_one(size: int, ranks: int, micro: int | None) -> None:
    message = refusal({"global": size, "micro": micro}, ranks, 10**9)
    if message is None:
        return
    advice = advised(message, {"micro": micro})
    assert advice is not None and advice["global"] is not None
    unit = ranks * (micro or 1)
    below, above = size // unit * unit, (size // unit + 1) * unit
    assert abs(advice["global"] - size) == min(abs(near - size) for near in (below, above) if near)


@repeatable
@given(st.integers(1, 500), RANKS, MICRO)
def test_the_numbers_of_ranks_that_are_advised_split_the_batch(size: int, ranks: int, micro: int | None) -> None:
    batch: Batch = {"global": size, "micro": micro}
    found = re.search(r"a number of ranks that divides (\d+)", refusal(batch, ranks, 10**9) or "")
    if found:
        number = int(found[1])
        for fewer in (each for each in range(1, number + 1) if number % each == 0):
            assert refusal(batch, fewer, 10**9) is None, f"{fewer} ranks for {batch}"


@repeatable
@given(batches(LARGE, st.none() | LARGE), RANKS, SIZES)
def test_sizes_far_beyond_the_dataset_are_refused_with_a_message(batch: Batch, ranks: int, samples: int) -> None:
    message = refusal(batch, ranks, samples)
    assert (message is None) == splits(batch, ranks, samples)
    advice = message and advised(message, batch)
    assert not advice or refusal(advice, ranks, samples) is None, f"{message} Tried {advice}."
