"""What ranks do in the tests of collectives."""

from pathlib import Path
from typing import Any


def measure_three_operations(out: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """Small messages of all operations; what this rank has measured and dropped."""
    import os

    from tutti.bench.collective_results import OPERATIONS
    from tutti.bench.collectives import Request, measure
    from tutti.bench.session import open_session
    from tutti.config.load import resolve
    from tutti.runtime.discovery import discover

    config = resolve("hello", ["recipe=collectives", "runtime.device=cpu", f"out={Path(out)}"]).config
    with open_session("bench", config, discover(os.environ)) as session:
        measured, dropped = measure(session, Request(OPERATIONS, (1024, 4096), 3, 0.4), lambda *_: None)
    return [each.plain() for each in measured], dropped
