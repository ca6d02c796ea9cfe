"""The sums of a log window over ranks."""

from types import SimpleNamespace
from typing import Any

import torch

from tutti.train.job import Job


def test_phases_are_read_when_a_gpu_has_done_their_work() -> None:
    """Totals wait for the device; the time between events that have not been reached cannot be read."""
    calls = []

    def noted(name: str, value: float) -> Any:
        return lambda: calls.append(name) or torch.tensor([value], dtype=torch.float64)

    job: Any = SimpleNamespace(
        learner=SimpleNamespace(totals=noted("totals", 1.0)),
        _own_phases=noted("phases", 2.0),
        _noise=None,
        group=SimpleNamespace(sum=lambda values: values),
    )
    assert Job._sum_window(job, with_phases=True) == [1.0, 2.0]
    assert calls == ["totals", "phases"]
    assert Job._sum_window(job) == [1.0]
