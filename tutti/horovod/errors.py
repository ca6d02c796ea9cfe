"""Horovod's exceptions, the texts of its errors, and its deprecation warnings."""

import sys
import warnings

SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to submit an "
    "operation after one of the ranks finished execution."
)
PROCESS_FAILED = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated."
)
NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class HorovodInternalError(RuntimeError):
    """An operation failed on all ranks; the elastic loop then restores the last commit."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed; with `skip_sync`, hosts were only removed."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


def describe_failed_process(name: object, code: int) -> str:
    """Return Horovod's message about the process that failed first."""
    return f"{PROCESS_FAILED} The first process to do so was:\nProcess name: {name}\nExit code: {code}"


def warn_deprecated(text: str) -> None:
    """Warn of a deprecated argument, at the line of the first caller outside this package."""
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").startswith("tutti.horovod"):
        level += 1
    warnings.warn(text, DeprecationWarning, stacklevel=level + 1)
