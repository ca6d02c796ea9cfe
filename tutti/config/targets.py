"""Values of metrics that a run is trained to."""

from collections.abc import Iterable, Mapping

from tutti.errors import ConfigError, nearest


def is_lower_better(metric: str) -> bool:
    """Whether less of a metric is better."""
    return metric.endswith(("loss", "error"))


def is_reached(target: Mapping[str, float], results: Mapping[str, float]) -> bool:
    """Whether all metrics of a target have come to their values; one that was not measured has not, nor has a NaN."""
    return all(
        metric in results and (results[metric] <= value if is_lower_better(metric) else results[metric] >= value)
        for metric, value in target.items()
    )


def check_measured(given: str, metric: str, recipe: str, metrics: Iterable[str]) -> None:
    """Refuse a target for a metric that is not among those of a run, named as in `metrics` of its recipe."""
    known = [f"valid_{name.rpartition(':')[2]}" for name in ("loss", *metrics)]
    if metric not in known:
        raise ConfigError(f"{given}: {recipe} measures {', '.join(known)}, and no {metric!r}.{nearest(metric, known)}")
