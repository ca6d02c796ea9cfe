"""Lines through made-up times of messages."""

import math

import pytest

from tutti.bench.collectives.model import MessageTime, blended, fit_line, wire_bits_per_second

SIZES = [1024 * 4**power for power in range(9)]


def line_points(
    latency: float, bandwidth: float, blend: int = 1, noise: tuple[float, ...] = (1.0,)
) -> list[MessageTime]:
    times = [blended(latency, size / bandwidth, blend) for size in SIZES]
    return [
        MessageTime(2, size, t * noise[i % len(noise)]) for i, (size, t) in enumerate(zip(SIZES, times, strict=True))
    ]


@pytest.mark.parametrize(("latency", "bandwidth"), [(3e-4, 1.2e8), (2e-5, 2e11), (5e-3, 1e7)])
def test_a_line_is_found_again_exactly(latency: float, bandwidth: float) -> None:
    line = fit_line(line_points(latency, bandwidth))
    assert line is not None
    assert line.latency_seconds == pytest.approx(latency, rel=1e-6)
    assert line.bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert line.blend == 1
    assert line.residual.worst < 1e-6 and line.residual.points == 9
    assert line.seconds(10**7) == pytest.approx(latency + 10**7 / bandwidth)


def test_a_latency_of_zero_is_not_negative() -> None:
    line = fit_line(line_points(0.0, 1e8, noise=(1.0, 1.02, 0.98)))
    assert line is not None
    assert 0 <= line.latency_seconds < 0.03 * SIZES[0] / 1e8
    assert line.bytes_per_second == pytest.approx(1e8, rel=0.03)


def test_times_that_do_not_grow_have_no_bandwidth() -> None:
    line = fit_line([MessageTime(2, size, 1e-3) for size in SIZES])
    assert line is not None
    assert line.latency_seconds == pytest.approx(1e-3)
    assert line.bytes_per_second == math.inf
    assert line.seconds(10**12) == pytest.approx(1e-3)


@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize("factor", [0.3, 4.0])
def test_one_outlier_changes_neither_latency_nor_bandwidth(place: int, factor: float) -> None:
    points = line_points(3e-4, 1.2e8)
    points[place] = MessageTime(2, points[place].bytes, factor * points[place].seconds)
    line = fit_line(points)
    assert line is not None
    assert line.latency_seconds == pytest.approx(3e-4, rel=0.02)
    assert line.bytes_per_second == pytest.approx(1.2e8, rel=0.02)
    assert line.residual.worst == pytest.approx(abs(1 / factor - 1), rel=0.05)


def test_small_and_large_messages_count_alike() -> None:
    line = fit_line(line_points(3e-4, 1.2e8, noise=(1.05, 0.95, 1.0)))
    assert line is not None
    assert line.latency_seconds == pytest.approx(3e-4, rel=0.06)
    assert line.bytes_per_second == pytest.approx(1.2e8, rel=0.06)
    assert 0.01 < line.residual.rms < 0.06


def test_bytes_that_hide_the_latency_are_blended_and_the_plain_sum_says_how_far_it_is_off() -> None:
    line = fit_line(line_points(1e-3, 1.2e8, blend=8))
    assert line is not None
    assert line.blend == 8
    assert line.latency_seconds == pytest.approx(1e-3, rel=0.01)
    assert line.bytes_per_second == pytest.approx(1.2e8, rel=0.01)
    assert line.residual.worst < 0.01
    assert line.sum_residual.worst > 0.3


def test_two_sizes_are_enough_for_a_line_and_one_is_not() -> None:
    line = fit_line([MessageTime(2, 1000, 1.01e-3), MessageTime(2, 1_000_000, 1.1e-2)])
    assert line is not None
    assert line.seconds(500_000) == pytest.approx(6.0e-3, rel=0.01)
    assert (line.blend, line.residual.points) == (1, 2)
    assert fit_line([MessageTime(2, 1000, 1e-3), MessageTime(2, 1000, 1.1e-3)]) is None


def test_the_wire_carries_headers_beside_the_payload() -> None:
    assert wire_bits_per_second(1e9 / 8 * 1448 / 1514) == pytest.approx(1e9)
