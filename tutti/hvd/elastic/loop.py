"""The loop of an elastic job: synchronise, train; after a failure or with other hosts, start again and go on."""

import functools
from collections.abc import Callable
from typing import Any

from tutti.errors import TuttiError
from tutti.hvd.elastic.membership import is_driven, membership
from tutti.hvd.elastic.state import State
from tutti.hvd.errors import HorovodInternalError, HostsUpdatedInterrupt


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """A function of a state that goes on from the last commit when ranks die, and with the hosts that there are."""

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
                if not is_driven() and state.commits == commits:
                    raise _hopeless(error, "A reset did not help") from error
                commits = state.commits
                state.restore()
                skip_sync = _reset(reset, error, False)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = _reset(reset, interrupt, interrupt.skip_sync)
            resets += 1

    return run


def _reset(reset: Callable[[], None], why: Exception, skip_sync: bool) -> bool:
    """Start the job again; whether all ranks have the same state, which the driver knows best."""
    if is_driven():
        membership().wish_to_skip_sync(skip_sync)
        reset()
        return membership().place.skip_sync
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
    """From now on this rank may be the one whose state the others take over."""
    if is_driven():
        membership().has_state = True
