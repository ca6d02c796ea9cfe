"""What is refused before a run starts: a noise scale where there is nothing to compare."""

from typing import Any

import pytest
from small_config import small_config

from tutti.config.check import check_noise_scale
from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.study.checking import check_config


def config(**values: Any) -> RunConfig:
    whole = small_config().model_dump(by_alias=True) | {"log": {"noise_scale": True}}
    return RunConfig.model_validate(whole | values)


@pytest.mark.parametrize("batch", [{"global": 8}, {"global": 8, "micro": 8}, {"per_rank": 8}])
def test_one_gradient_in_a_step_has_no_noise_scale(batch: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(config(batch=batch), 1)  # of a point of a study
    assert str(refused.value) == (
        "log.noise_scale=true on 1 rank whose steps have 1 forward pass: expected 2 or more gradients in a step, to "
        "compare with their mean. Start more ranks, or set batch.micro=4, which accumulates gradients over "
        "micro-batches."
    )
    check_noise_scale(config(batch=batch), 2)
    check_noise_scale(config(batch=batch, log={"noise_scale": False}), 1)


def test_micro_batches_are_compared_on_one_rank() -> None:
    check_noise_scale(config(batch={"global": 8, "micro": 2}), 1)


def test_keras_needs_more_ranks() -> None:
    with pytest.raises(ConfigError, match=r"Start more ranks, for example with -n 2\.$"):
        check_noise_scale(config(framework="keras"), 1)


def test_gradients_that_are_not_averaged_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match=r"ddp\.communicate=false: expected gradients that are averaged"):
        check_noise_scale(config(ddp={"communicate": False}), 2)
