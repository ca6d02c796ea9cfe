"""A link between nodes that is given or was measured apart: how long the exchange of a step takes over it."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import ConfigError
from tutti.forecast.curve import MeasuredRun, ScalingCurve
from tutti.forecast.posterior import Level
from tutti.study.links import read_all_reduce

DEVIATION = 0.1  # of the log step time that a link implies, where no several nodes were measured
GIVEN_DEVIATION = 0.08  # of the log of an all-reduce, from a nominal rate
MEASURED_DEVIATION = 0.04  # of the same, from measured collectives
BACKWARD = 2 / 3  # of compute, which the exchange may overlap
OVERLAP = 2.0  # (backward^p + exchange^p)^(1/p)
BUCKET_BYTES = 25 * 2**20  # of the gradients that are reduced together
_RATES = {"gbit": 1.25e8, "mbit": 1.25e5, "gb": 1e9, "mb": 1e6}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}


@dataclass(frozen=True)
class GivenLink:
    """The rate and the latency of the link of a node."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class KnownLink:
    """A link that is given or was measured apart: how long the all-reduce of the gradients takes over it."""

    source: str
    deviation: float  # of the log of its seconds
    seconds: Callable[[int], float]  # by the number of ranks, on several nodes


def parse_link(text: str) -> GivenLink:
    """Read RATE,LATENCY, as in 200Gbit,3us."""
    rate, comma, latency = text.partition(",")
    if not comma:
        raise ConfigError(f"--link {text}: expected RATE,LATENCY, as in 200Gbit,3us.")
    return GivenLink(_quantity("--link", text, rate, _RATES), _quantity("--link", text, latency, _TIMES))


def parse_size(text: str) -> float:
    """Read an amount of bytes, as in 97.5MiB."""
    return _quantity("--gradients", text, text, _SIZES)


def given_link(curve: ScalingCurve, text: str, gradient_bytes: float | None) -> KnownLink:
    """The all-reduce of the gradients in a ring over a link that is given as RATE,LATENCY."""
    link = parse_link(text)
    size = _checked_size(curve, "--link", gradient_bytes)
    buckets = math.ceil(size / BUCKET_BYTES)

    def seconds(ranks: int) -> float:
        return 2 * (ranks - 1) / ranks * size / link.bytes_per_second + 2 * buckets * link.latency_seconds

    return KnownLink(text, GIVEN_DEVIATION, seconds)


def measured_link(curve: ScalingCurve, given: Path, gradient_bytes: float | None) -> KnownLink:
    """The all-reduce of the gradients as a measurement of collectives on several hosts has it."""
    model, _ = read_all_reduce(given)
    if not any(each.across_hosts for each in model.regimes):
        raise ConfigError(
            f"--collectives {given}: all ranks were on one host: expected a measurement on 2 nodes or more. "
            "Run `tutti bench collectives --operations all_reduce` on 2 nodes."
        )
    size = _checked_size(curve, "--collectives", gradient_bytes)
    return KnownLink(str(given), MEASURED_DEVIATION, lambda ranks: model.seconds(ranks, size, True))


def two_node_level(curve: ScalingCurve, link: KnownLink) -> Level:
    """The step on two full nodes that a link implies."""
    full = _fullest(curve)
    assert full.per_rank_batch is not None
    seconds = full.per_rank_batch * full.ranks / full.samples_per_second
    exchange = link.seconds(2 * curve.ranks_per_node)
    backward = BACKWARD * seconds
    step = seconds - backward + (backward**OVERLAP + exchange**OVERLAP) ** (1 / OVERLAP)
    log_time = math.log(curve.time_of(full.ranks, full.samples_per_second) * step / seconds)
    return Level(2, log_time, DEVIATION, curve.batch_ratio(full.ranks))


def _fullest(curve: ScalingCurve) -> MeasuredRun:
    return max(curve.measurements, key=lambda each: (each.nodes == 1, each.ranks))


def _checked_size(curve: ScalingCurve, option: str, gradient_bytes: float | None) -> float:
    if gradient_bytes is None or _fullest(curve).per_rank_batch is None:
        lacking = "--gradients BYTES" if gradient_bytes is None else "the column per_rank_batch"
        raise ConfigError(
            f"{option} says how fast bytes travel: expected {lacking} as well, since the exchange of a step is "
            "compared with the seconds of its compute."
        )
    return gradient_bytes


def _quantity(option: str, whole: str, text: str, known: dict[str, float]) -> float:
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]+)(/s)?\s*", text)
    scale = known.get(found[2].lower()) if found else None
    try:
        value = float(found[1]) * scale if found and scale else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        example = {"--link": "200Gbit,3us", "--gradients": "97.5MiB"}[option]
        raise ConfigError(
            f"{option} {whole}: {text.strip() or '(nothing)'} is no number with a unit: expected one of "
            f"{', '.join(known)}, as in {example}."
        )
    return value
