"""What ranks do in the tests of profiles."""

import os
import time


def offset_with_a_clock_ahead(nanoseconds: int) -> tuple[int, int]:
    """Measure the clocks of ranks of which each is ahead of the one before it."""
    from tutti.bench import profile_clock
    from tutti.config.schema import RuntimeConfig
    from tutti.runtime.discovery import discover
    from tutti.runtime.group import join

    placement = discover(os.environ)
    group = join(placement, RuntimeConfig(device="cpu"))
    real = time.time_ns
    time.time_ns = lambda: real() + nanoseconds * placement.rank
    try:
        found = profile_clock.measure_offset(group)
    finally:
        time.time_ns = real
    assert profile_clock.shares_first_clock(group)  # it is one kernel
    group.leave()
    return found
