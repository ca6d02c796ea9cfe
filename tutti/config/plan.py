"""Batch arithmetic: the global batch on a given number of ranks."""

import math
from dataclasses import dataclass

from tutti.config.layout import Layout, chunks_per_rank, make_layout
from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.units import count

MANY_SAMPLES = 1 << 40  # for a plan before their number is known: an epoch is long


@dataclass(frozen=True)
class Plan:
    """How many samples a step takes on all ranks, on each, and in one forward pass; how many steps there are.

    Ranks that share samples, as those of a sample split in space, count as one in `per_rank_batch`.
    """

    layout: Layout
    global_batch: int
    per_rank_batch: int
    micro_batch: int
    train_samples: int
    epochs: int
    max_steps: int | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.layout.world_size

    @property
    def passes(self) -> int:
        """Forward passes of one rank in a step."""
        return self.per_rank_batch // self.micro_batch

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in an epoch; the remaining samples are left out, different ones in each epoch."""
        return self.train_samples // self.global_batch

    @property
    def is_counted(self) -> bool:
        """Whether the number of samples is known, and so how many steps an epoch has."""
        return self.train_samples != MANY_SAMPLES

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)


def make_plan(config: RunConfig, world_size: int, train_samples: int, local_size: int | None = None) -> Plan:
    """Split the global batch over the ranks; raises ConfigError if it does not split."""
    batch, layout = config.batch, make_layout(config.parallel, world_size, local_size)
    ranks = layout.data_ranks
    per_rank_batch, unit = batch.per_rank, ranks * (batch.micro or 1)
    global_batch = per_rank_batch * ranks if per_rank_batch is not None else batch.global_batch or 0
    most = train_samples // unit * unit  # samples in the largest global batch that splits
    if train_samples < global_batch:
        fix = f"Set batch.global={most} or less." if most else "Start fewer ranks, or lower batch.micro."
        raise ConfigError(
            f"a global batch of {global_batch} is larger than the {train_samples} training samples of "
            f"{config.data.name!r}: there would be no step. {fix}"
        )
    if per_rank_batch is None:
        _check_split(global_batch, ranks, batch.micro, most)
    per_rank = global_batch // ranks
    micro = batch.micro or per_rank
    if per_rank % micro:
        raise ConfigError(
            f"batch.micro={micro} does not divide the {per_rank} samples of a rank: expected a divisor of {per_rank}. "
            f"Set batch.micro={_nearest_divisor(per_rank, micro)}, or change batch.per_rank."
        )
    _check_passes(config, layout, per_rank, micro)
    return Plan(layout, global_batch, per_rank, micro, train_samples, config.epochs, config.max_steps)


def _check_passes(config: RunConfig, layout: Layout, per_rank: int, micro: int) -> None:
    """Refuse a number of micro-batches with which a schedule cannot keep its stages busy."""
    schedule, stages, passes = config.parallel.schedule, layout.stages, per_rank // micro
    interleaves = chunks_per_rank(config.parallel) > 1
    if stages == 1 or schedule == "gpipe" or (passes >= stages and not (interleaves and passes % stages)):
        return
    wanted = f"a multiple of {stages}" if interleaves else f"{stages} or more"
    most = max(stages, passes // stages * stages)  # micro-batches, where the batch of a rank splits into so many
    fixes = [f"Set batch.micro={per_rank // most}"] if per_rank % most == 0 else []
    fixes.append("set parallel.schedule=gpipe, which takes any number")
    fix = ", or ".join(fixes)
    raise ConfigError(
        f"parallel.schedule={schedule} with {stages} stages, and {passes} as the number of micro-batches in a step: "
        f"expected {wanted}. {fix[0].upper()}{fix[1:]}."
    )


def _check_split(global_batch: int, ranks: int, micro: int | None, most: int) -> None:
    unit = ranks * (micro or 1)
    if global_batch % unit:
        nearest = min(most, max(unit, (global_batch + unit // 2) // unit * unit))
        passes = f" of micro-batches of {micro}" if micro else ""
        whole, rest = divmod(global_batch, micro or 1)
        fixes = [f"set batch.global={nearest}"] if nearest else []
        if not rest:
            fixes.append(f"start a number of ranks that divides {whole}")
        fix = ", or ".join(fixes) or "start fewer ranks, or lower batch.micro"
        raise ConfigError(
            f"batch.global={global_batch} does not split over {count(ranks, 'rank')}{passes}: expected a multiple of "
            f"{unit}. {fix[0].upper()}{fix[1:]}."
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return min(small + [number // divisor for divisor in reversed(small)], key=lambda divisor: abs(divisor - wanted))
