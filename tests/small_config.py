"""The smallest configuration of a run, for tests that change a few of its values; no data is read for it."""

from functools import cache

from tutti.config.load import resolve_values
from tutti.config.run import RunConfig


@cache
def small_config(epochs: int = 1) -> RunConfig:
    return resolve_values(
        {
            "data": {"name": "synthetic"},
            "model": {"name": "mlp"},
            "optim": {"name": "sgd", "lr": 0.1},
            "batch": {"global": 8},
            "epochs": epochs,
        }
    )
