"""Elastic training without a framework: the state that is committed and restored, and the loop that restarts."""

import copy
import functools
import queue
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tutti.errors import TuttiError
from tutti.horovod.elastic.membership import is_driven, membership
from tutti.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

NO_UPDATE, REMOVED, ADDED = 0, 1, 2  # changes of the hosts; 3 is both

BroadcastObject = Callable[[Any], Any]


class Restorable:
    """What can be saved in memory, restored, and synchronized over ranks."""

    def save(self) -> None:
        """Copy the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the saved copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast the state of rank 0; every rank must enter."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt what depends on the number of ranks."""


class State(Restorable):
    """The state of a training, which is committed at points from which it can resume."""

    def __init__(self, bcast_object: BroadcastObject, get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._host_messages: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._num_commits = 0  # not `commits`: attributes without an underscore are the user's
        self._host_notice: object = None  # of the elastic driver, the last one

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to call after each reset, when the number of ranks may have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the new number of ranks after a reset."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = ADDED) -> None:
        """Record that hosts were added or removed; `check_host_updates` calls it for a notice of the driver."""
        self._host_messages.put(update_res)

    def commit(self) -> None:
        """Save the state, and interrupt for a reset if hosts were added or removed."""
        self.save()
        self._num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks together, if rank 0 knows that the hosts have changed."""
        notice = membership().hosts_changed() if is_driven() else None
        if notice is not None and notice != self._host_notice:
            self._host_notice = notice
            self.on_hosts_updated(time.time(), REMOVED if notice.skip_sync else ADDED)
        update = NO_UPDATE
        while not self._host_messages.empty():
            update |= self._host_messages.get()
        update = self._bcast_object(update)
        if update != NO_UPDATE:
            raise HostsUpdatedInterrupt(update == REMOVED)


class ObjectState(State):
    """A state of attributes whose values can be copied and pickled."""

    if TYPE_CHECKING:  # their names are known at run time only

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
        ObjectState.save(self)  # the current values of rank 0, not those it saved last
        self._saved_state = self._bcast_object(self._saved_state)
        ObjectState.restore(self)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Make a function of a state resume from the last commit when ranks fail, and continue when hosts change."""

    @functools.wraps(func)
    def run(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        resets, commits = 0, -1
        while True:
            try:
                if resets:
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                    _note_state()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if not is_driven() and state._num_commits == commits:
                    raise _hopeless(error, "A reset did not help") from error
                commits = state._num_commits
                state.restore()
                skip_sync = _reset(reset, error, False)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = _reset(reset, interrupt, interrupt.skip_sync)
            resets += 1

    return run


def _reset(reset: Callable[[], None], why: Exception, skip_sync: bool) -> bool:
    """Restart the job, and return whether all ranks have the same state; in an elastic job the driver decides that."""
    if is_driven():
        membership().wish_to_skip_sync(skip_sync)
        reset()
        return membership().assignment.skip_sync
    try:
        reset()
    except (TuttiError, RuntimeError) as failure:
        raise _hopeless(why, f"The job could not be started again ({failure})") from failure
    return skip_sync


def _hopeless(error: Exception, why: str) -> HorovodInternalError:
    return HorovodInternalError(
        f"{error} {why}, and no elastic driver is there to replace ranks. "
        "Start the job with horovodrun --min-np N, or start all ranks again."
    )


def _note_state() -> None:
    """Record that this rank has a state that other ranks may receive."""
    if is_driven():
        membership().has_state = True
