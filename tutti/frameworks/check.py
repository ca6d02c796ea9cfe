"""What can be refused before anything starts; imports no framework, because whoever starts the ranks waits for it."""

from tutti.config.framework import check_installed
from tutti.config.plan import make_plan
from tutti.config.run import RunConfig
from tutti.optim.schedule import make_schedule
from tutti.train.check import check_best, check_stop


def check_parts(config: RunConfig, world_size: int) -> None:
    """Refuse what is wrong whatever the data: a framework that is not installed, batches that do not split."""
    check_installed(config)
    config.data.locate()
    check_best(config, config.metrics)
    check_stop(config, config.metrics)
    samples = config.data.train_samples()
    if samples is not None:
        make_schedule(config, make_plan(config, world_size, samples))
