"""What an elastic job keeps: saved at commits, restored after a failure, taken over from rank 0 by who is new."""

import copy
import queue
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tutti.hvd.elastic.membership import is_driven, membership
from tutti.hvd.errors import HostsUpdatedInterrupt

NO_UPDATE, REMOVED, ADDED = 0, 1, 2  # what has happened to the hosts; 3 is both

BroadcastObject = Callable[[Any], Any]


class State:
    """Something that can be saved in memory, restored, and made the same on all ranks."""

    def __init__(self, bcast_object: BroadcastObject, get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._host_messages: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have functions called after each reset, when the number of ranks may be another."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """After a reset: fit what depends on the number of ranks."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = ADDED) -> None:
        """Note that hosts have come or gone; the next check tells all ranks."""
        self._host_messages.put(update_res)

    def commit(self) -> None:
        """Save, and leave for a reset if hosts have come or gone."""
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks together, if rank 0 knows of other hosts."""
        update = NO_UPDATE
        while not self._host_messages.empty():
            update |= self._host_messages.get()
        if is_driven() and (news := membership().hosts_changed()) is not None:
            update |= REMOVED if news.skip_sync else ADDED
        update = self._bcast_object(update)
        if update != NO_UPDATE:
            raise HostsUpdatedInterrupt(update == REMOVED)

    def save(self) -> None:
        """Keep a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over what rank 0 has; every rank must enter."""
        raise NotImplementedError

    def reset(self) -> None:
        """Fit what depends on the number of ranks."""


class ObjectState(State):
    """A state of plain attributes, each a value that can be copied and pickled."""

    if TYPE_CHECKING:  # what they are called is known where one is made

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, bcast_object: BroadcastObject, get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = list(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._names})

    def restore(self) -> None:
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        if not self._names:
            return
        ObjectState.save(self)  # what rank 0 has, not what it last saved
        self._saved_state = self._bcast_object(self._saved_state)
        ObjectState.restore(self)
