"""Horovod's exceptions and the texts of its errors."""

SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to submit an "
    "operation after one of the ranks finished execution."
)
NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class HorovodInternalError(RuntimeError):
    """An operation failed on all ranks; the elastic loop then restores the last commit."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed; with `skip_sync`, hosts were only removed."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync
