"""What the HOROVOD_* variables say, read once at the start of a job."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

LOG_LEVELS = {"TRACE": "DEBUG", "FATAL": "CRITICAL"} | {level: level for level in ("DEBUG", "INFO", "WARNING", "ERROR")}
_CYCLES, _SHORT_CYCLES = 1000, 100  # a message costs more here than it does in Horovod


@dataclass(frozen=True)
class Settings:
    """How the engine of a job works."""

    fusion_bytes: int = 128 << 20
    cache_capacity: int = 1024
    gather_seconds: float = 1.0  # for so long submissions are gathered while nobody on any rank waits for them
    short_gather_seconds: float = 0.1  # the same while another rank does
    gather_bytes: int = 25 << 20  # or until they are so much
    stall_warning_seconds: float | None = 60.0
    stall_shutdown_seconds: float = 0.0  # 0: never
    log_level: str = ""
    timeline: str = ""  # the file that a timeline is written to from the start
    marks_cycles: bool = False
    dynamic_sets: bool = False  # process sets may change while the job runs


def read_settings(env: Mapping[str, str]) -> Settings:
    """The settings of the environment; what is no number where one is expected is refused by its name."""
    timeline = env.get("HOROVOD_TIMELINE", "")
    cycle_seconds = number(env, "CYCLE_TIME", 1.0) / 1000
    return Settings(
        fusion_bytes=int(number(env, "FUSION_THRESHOLD", 128 << 20)),
        cache_capacity=int(number(env, "CACHE_CAPACITY", 1024)),
        gather_seconds=_CYCLES * cycle_seconds,
        short_gather_seconds=_SHORT_CYCLES * cycle_seconds,
        stall_warning_seconds=None
        if _is_set(env, "STALL_CHECK_DISABLE")
        else number(env, "STALL_CHECK_TIME_SECONDS", 60.0),
        stall_shutdown_seconds=number(env, "STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        log_level=_log_level(env),
        timeline="" if timeline.upper() == "DYNAMIC" else timeline,
        marks_cycles=_is_set(env, "TIMELINE_MARK_CYCLES"),
        dynamic_sets=_is_set(env, "DYNAMIC_PROCESS_SETS"),
    )


def number(env: Mapping[str, str], name: str, default: float) -> float:
    """A number from the environment; what is none, or below 0, is refused by the variable's name."""
    given = env.get(f"HOROVOD_{name}") or str(default)
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"HOROVOD_{name}={given!r}: expected a number, 0 or more. Set it right, or unset it.")
    return value


def _log_level(env: Mapping[str, str]) -> str:
    """The name of a level of Python's logging, or nothing."""
    given = env.get("HOROVOD_LOG_LEVEL", "").upper()
    if given and given not in LOG_LEVELS:
        known = ", ".join(level.lower() for level in LOG_LEVELS)
        raise ValueError(f"HOROVOD_LOG_LEVEL={given.lower()!r}: expected one of {known}. Set it right, or unset it.")
    return LOG_LEVELS.get(given, "")


def _is_set(env: Mapping[str, str], name: str) -> bool:
    return env.get(f"HOROVOD_{name}", "0") not in ("0", "")
