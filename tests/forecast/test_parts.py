"""Forecasts by the parts of a step over a known link, of steps whose law is known."""

import math
from dataclasses import dataclass

import pytest

from tutti.forecast.curve import MeasuredRun, ScalingCurve, make_curve
from tutti.forecast.forecast import Forecast, fit_curve, forecast
from tutti.forecast.link import KnownLink
from tutti.forecast.population import Fabric


@dataclass(frozen=True)
class Machine:
    """Nodes of one rank that wait, exchange and read by a law."""

    seconds_a_sample: float = 0.002
    fixed_seconds: float = 0.0
    exchange: float = 0.05  # of all gradients between two nodes
    buckets: int = 1
    slow_seconds: float = 0.0  # of rank 1
    server: float = math.inf  # samples per second for all ranks
    batch: int = 64
    mode: str = "weak"

    def run(self, ranks: int) -> MeasuredRun:
        batch = self.batch if self.mode == "weak" else self.batch / ranks
        own = self.fixed_seconds + self.seconds_a_sample * batch + (self.slow_seconds if ranks > 1 else 0.0)
        exchange = 0.0 if ranks == 1 else self.exchange * 2 * (ranks - 1) / ranks
        hidden = 2 / 3 * own * (self.buckets - 1) / self.buckets
        exposed = max(exchange / self.buckets, exchange - hidden)
        reading = max(ranks * batch / self.server - own - exposed, 0.0)
        speed = ranks * batch / (own + exposed + reading)
        return MeasuredRun(ranks, ranks, speed, batch, exposed, reading, self.slow_seconds > 0)

    def curve(self, *ranks: int) -> ScalingCurve:
        return make_curve([self.run(each) for each in ranks], self.mode)  # pyright: ignore[reportArgumentType]

    def link(self, factor: float = 1.0) -> KnownLink:
        return KnownLink("known", 0.05, lambda ranks: factor * self.exchange * 2 * (ranks - 1) / ranks)

    def ask(self, *ranks: int, factor: float = 1.0) -> list[Forecast]:
        return forecast(fit_curve(self.curve(1, 2), Fabric.TCP, self.link(factor)), ranks)


MACHINES = {
    "one bucket": Machine(),
    "an exchange that is longer than compute": Machine(exchange=0.5),
    "several buckets, most of them hidden": Machine(buckets=4),
    "several buckets, more than backward hides": Machine(buckets=4, exchange=0.3),
    "strong": Machine(mode="strong", batch=512),
    "strong, with compute that does not shrink": Machine(mode="strong", batch=256, fixed_seconds=0.05),
    "strong, and the exchange takes over": Machine(mode="strong", batch=128, exchange=0.2),
    "a slow rank": Machine(slow_seconds=0.05),
    "a file server that two ranks fill": Machine(server=600.0),
    "a file server that one rank fills": Machine(server=400.0),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_four_nodes_follow_from_one_and_two(machine: Machine) -> None:
    for made in machine.ask(3, 4):
        truth = machine.run(made.ranks).samples_per_second
        assert made.samples_per_second == pytest.approx(truth, rel=0.05)
        assert made.interval90[0] < truth < made.interval90[1]
        assert made.interval90[1] < 1.5 * made.interval90[0]


@pytest.mark.parametrize("factor", [0.92, 1.08])
def test_a_link_that_is_a_little_off_is_corrected_by_what_was_measured(factor: float) -> None:
    machine = Machine(exchange=0.3)
    [made] = machine.ask(4, factor=factor)
    assert made.samples_per_second == pytest.approx(machine.run(4).samples_per_second, rel=0.04)


def test_what_a_link_cannot_say_is_said() -> None:
    assert any("file system is not in the numbers" in each for each in Machine().ask(4)[0].warnings)
    assert any("reading limits the step" in each for each in Machine(server=400.0).ask(4)[0].warnings)
    assert Machine().ask(4)[0].basis == "from measurements on 1, 2 nodes, TCP, link known"


def test_a_file_server_that_filled_late_leaves_more_open() -> None:
    early, late = (Machine(server=each).ask(4)[0] for each in (400.0, 640.0))
    widths = [made.interval90[1] / made.interval90[0] for made in (early, late)]
    assert widths[1] > widths[0] * 1.02


def test_measured_nodes_are_not_forecast_by_parts() -> None:
    machine = Machine()
    [made] = machine.ask(2)
    assert made.samples_per_second == pytest.approx(machine.run(2).samples_per_second, rel=0.05)
