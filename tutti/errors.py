"""The errors that users see, each with its cause; a message says what was given, what was expected and what to do."""

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """Why a run ended before its goal, as record.json and the failure notes of ranks store it."""

    CONFIGURATION = "configuration"
    LAUNCH = "launch"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    FOLDER = "folder"
    DIVERGED = "diverged"  # the loss is not finite
    OUT_OF_MEMORY = "out_of_memory"
    RANK_LOST = "rank_lost"
    TIMEOUT = "timeout"  # some ranks did not arrive in time
    INTERRUPTED = "interrupted"  # a signal, Ctrl-C or the end of the allocation
    ERROR = "error"  # any other exception


class TuttiError(Exception):
    """An error shown to the user as one message, without a traceback."""

    exit_code = 2
    cause = Cause.ERROR
    rank: int | None = None  # the rank where it happened, where that is known
    step: int | None = None  # the step in which it happened
    agreed = False  # every rank raises it, so that rank 0 speaks for all
    told = False  # another rank tells the user


class ConfigError(TuttiError):
    """A recipe, an override or a command-line value is wrong."""

    cause = Cause.CONFIGURATION


class LaunchError(TuttiError):
    """Ranks cannot be started, or the environment contradicts itself about who they are."""

    cause = Cause.LAUNCH


class DataError(TuttiError):
    """A data file is missing, truncated or not what it claims to be."""

    cause = Cause.DATA


class CheckpointError(TuttiError):
    """A checkpoint is damaged, or belongs to another run."""

    cause = Cause.CHECKPOINT


class FolderError(TuttiError):
    """A run folder cannot be written or read."""

    cause = Cause.FOLDER


class TrainingError(TuttiError):
    """Training failed although its input was right."""

    exit_code = 1


class DivergedError(TrainingError):
    """The loss is not finite."""

    cause = Cause.DIVERGED


class OutOfMemory(TrainingError):
    """A rank needs more memory than it may use."""

    cause = Cause.OUT_OF_MEMORY
    record: Any = None  # the path of the run's record, where it has one


class FunctionFailed(TuttiError):
    """A function that `tutti.launch` has called failed on a rank; the message has the traceback of the rank."""

    exit_code = 1


class DeadlineError(TuttiError):
    """Some ranks did not arrive in time."""

    exit_code = 1
    cause = Cause.TIMEOUT


class Interrupted(TuttiError):
    """The run was stopped from outside after it had saved: start it again."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h
    cause = Cause.INTERRUPTED


class RankLost(TuttiError):
    """Other ranks are gone or out of reach: starting again may help."""

    exit_code = 76
    cause = Cause.RANK_LOST


# By name, since torch and TensorFlow are not imported here.
_OUT_OF_MEMORY = {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"}
_ALLOCATORS = ("DefaultCPUAllocator", "std::bad_alloc")


def cause_of(error: BaseException) -> Cause:
    """The cause that an exception stands for."""
    if isinstance(error, TuttiError):
        return error.cause
    if isinstance(error, KeyboardInterrupt):
        return Cause.INTERRUPTED
    is_memory = any(kind.__name__ in _OUT_OF_MEMORY for kind in type(error).__mro__)
    # torch has no class of its own for memory of the host.
    is_memory = is_memory or (isinstance(error, RuntimeError) and any(each in str(error) for each in _ALLOCATORS))
    is_memory = is_memory or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return Cause.OUT_OF_MEMORY if is_memory else Cause.ERROR


def summarise_error(error: BaseException) -> str:
    """An exception in one line: the message of an error of ours, the type and the message of any other."""
    text = str(error) if isinstance(error, TuttiError) else f"{type(error).__name__}: {error}"
    return text.split("\n")[0]


def nearest(given: str, choices: Iterable[str]) -> str:
    """' Did you mean X?' for the closest choice, or nothing when none is close."""
    close = get_close_matches(given, list(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
