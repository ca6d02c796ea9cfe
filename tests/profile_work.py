"""What ranks do in the tests of profiles."""

import os
import time


def offset_with_a_clock_ahead(nanoseconds: int) -> tuple[int, int]:
    """Measure the clocks of ranks of which each is ahead of the one before it."""
    from tutti.bench.trace import timeline
    from tutti.config.schema import RuntimeConfig
    from tutti.ranks.environments import discover
    from tutti.ranks.group import join

    placement = discover(os.environ)
    group = join(placement, RuntimeConfig(device="cpu"))
    real = time.time_ns
    time.time_ns = lambda: real() + nanoseconds * placement.rank
    try:
        found = timeline.measure_offset(group)
    finally:
        time.time_ns = real
    assert timeline.shares_first_clock(group)  # it is one kernel
    group.leave()
    return found
