"""Made-up measurements, for tests of the conclusions from them."""

from collections.abc import Callable, Mapping
from typing import Any

from tutti.bench.results import Measurement
from tutti.config.load import resolve

Times = float | Callable[[int, int], float]  # seconds a step, or what gives them for a rank and a trial


def made_up(
    *overrides: str,
    recipe: str = "digits",
    ranks: int = 1,
    trials: int = 5,
    data: Times = 0.0,
    computing: Times = 0.0,
    communication: Times = 0.0,
    rest: Times = 0.0,
    phases: Mapping[str, Times | None] | None = None,
    **fields: Any,
) -> Measurement:
    """Steps of known parts; ranks that are done early wait for the last one, and phases alone take what they show."""

    def table(times: Times) -> list[list[float]]:
        return [[times(r, t) if callable(times) else times for t in range(trials)] for r in range(ranks)]

    read, compute, exchange, others = table(data), table(computing), table(communication), table(rest)
    last = [max(read[r][t] + compute[r][t] for r in range(ranks)) for t in range(trials)]
    waited = [[exchange[r][t] + last[t] - read[r][t] - compute[r][t] for t in range(trials)] for r in range(ranks)]
    zeros = table(0.0)
    parts = {"data": read, "forward": compute, "backward": zeros, "communication": waited, "update": zeros}
    whole = [[last[t] + exchange[r][t] + others[r][t] for t in range(trials)] for r in range(ranks)]
    alone: dict[str, Times | None] = {"read": data, "compute": computing, "double": None, "exchange": communication}
    if ranks == 1:
        alone["exchange"] = None
    given = {name: table(times) for name, times in (alone | dict(phases or {})).items() if times is not None}
    values: dict[str, Any] = {
        "name": "made up",
        "overrides": overrides,
        "settings": resolve(recipe, overrides).config.plain(),
        "ranks": ranks,
        "hosts": tuple(f"host{rank}" for rank in range(ranks)),
        "cores": 8,
        "local_ranks": 1,
        "device": "cpu",
        "device_name": "cpu",
        "threads": 8,
        "per_rank_batch": 32,
        "global_batch": 32 * ranks,
        "parameters": 1000,
        "gradient_bytes": 4000,
        "steps": {"whole": 10},
        "seconds": given | {"whole": whole},
        "parts": parts | {"rest": others},
        "peak_bytes": (1 << 30,) * ranks,
    }
    return Measurement(**values | fields)


def by_trial(*values: float) -> Callable[[int, int], float]:
    """The same on all ranks, one value a trial."""
    return lambda rank, trial: values[trial % len(values)]


def by_rank(*values: float) -> Callable[[int, int], float]:
    """The same in all trials, one value a rank."""
    return lambda rank, trial: values[rank]
