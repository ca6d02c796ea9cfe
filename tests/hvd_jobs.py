"""What the rank functions of the Horovod tests share."""

import functools
from collections.abc import Callable
from typing import Any

from tutti.horovod import basics
from tutti.horovod.torch import ops


def in_a_job(work: Callable[..., Any]) -> Callable[..., Any]:
    """Between init and a shutdown that no rank begins before all are done."""

    @functools.wraps(work)
    def whole(*arguments: Any) -> Any:
        basics.init()
        answer = work(*arguments)
        ops.barrier()
        basics.shutdown()
        return answer

    return whole


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    """The type and text of the error that a call ends with."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")
