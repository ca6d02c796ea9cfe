"""The deadlines of a recipe hold for ranks in Keras and TensorFlow, too."""

import os
from types import SimpleNamespace

import pytest

from tutti.config.schema import RuntimeConfig
from tutti.frameworks import run
from tutti.ranks.placement import Placement

NAMES = ("HOROVOD_START_TIMEOUT", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")


def test_the_engine_gives_up_after_the_times_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    seen: list[str | None] = []
    monkeypatch.setattr(run.basics, "init", lambda: seen.extend(os.environ.get(name) for name in NAMES))
    monkeypatch.setattr(run.basics, "joined", lambda: SimpleNamespace(hub=None, store=None, hosts=["here"]))
    config = RuntimeConfig(start_timeout_seconds=7.0, timeout_seconds=9.0)
    group = run.join(Placement("none", 0, 1, 0, 1, 0, None, None), config)
    assert seen == ["7.0", "9.0"], "they are set before the engine starts"
    assert group.timeout_seconds == 9.0, "meetings of ranks have the same"
