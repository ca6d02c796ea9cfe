"""The named errors a user may meet; each message says what was given, what was expected and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class TuttiError(Exception):
    """An error shown to the user as one message, without a traceback."""

    exit_code = 2
    agreed = False  # every rank raises it, so that rank 0 speaks for all
    told = False  # another rank tells the user


class ConfigError(TuttiError):
    """A recipe, an override or a command-line value is wrong."""


class LaunchError(TuttiError):
    """Ranks cannot be started, or the environment contradicts itself about who they are."""


class DataError(TuttiError):
    """A data file is missing, truncated or not what it claims to be."""


class CheckpointError(TuttiError):
    """A checkpoint is damaged, or belongs to another run."""


class FolderError(TuttiError):
    """A run folder cannot be written or read."""


class TrainingError(TuttiError):
    """Training went wrong although its input was right, for example a loss that is not a number."""

    exit_code = 1


class DeadlineError(TuttiError):
    """Some ranks did not arrive in time."""

    exit_code = 1


class Interrupted(TuttiError):
    """The run was stopped from outside after it had saved: start it again."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class RankLost(TuttiError):
    """Other ranks are gone or out of reach: starting again may help."""

    exit_code = 76


def nearest(given: str, choices: Iterable[str]) -> str:
    """' Did you mean X?' for the closest choice, or nothing when none is close."""
    close = get_close_matches(given, list(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
