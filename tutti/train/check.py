"""What can be refused before anything starts; imports little, because whoever starts the ranks waits for it."""

from collections.abc import Iterable

from tutti.config.plan import make_plan
from tutti.config.run import RunConfig
from tutti.config.targets import check_measured
from tutti.errors import ConfigError
from tutti.optim.schedule import make_schedule


def check_parts(config: RunConfig, world_size: int) -> None:
    """Refuse what is wrong whatever the data: names that do not import, batches that do not split."""
    for part in (config.data, config.model, config.loss, config.optim):
        part.locate()
    config.metric_functions()
    check_best(config, [name.rpartition(":")[2] for name in config.metrics])
    check_stop(config, config.metrics)
    samples = config.data.train_samples()
    if samples is not None:
        make_schedule(config, make_plan(config, world_size, samples))


def check_best(config: RunConfig, metrics: Iterable[str]) -> None:
    """Refuse a watched metric that the run does not measure."""
    best = config.checkpoint.best
    if best is not None and best not in ("loss", *metrics):
        known = ", ".join(("loss", *metrics))
        raise ConfigError(f"checkpoint.best={best!r}: expected one of this run's metrics, {known}.")


def check_stop(config: RunConfig, metrics: Iterable[str], validates: bool = True) -> None:
    """Refuse to stop at a metric that the run does not measure."""
    for metric, value in (config.stop_at or {}).items():
        given = f"stop_at.{metric}={value:g}"
        if not validates:
            raise ConfigError(
                f"{given}, but there is no validation data: expected some. Give it, or leave out stop_at."
            )
        check_measured(given, metric, config.recipe, metrics)
