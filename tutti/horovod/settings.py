"""The HOROVOD_* variables: as ranks read them, and as flags and YAML settings of `horovodrun` set them."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.config.recipes import read_yaml
from tutti.errors import ConfigError, nearest

LOG_LEVELS = {"TRACE": "DEBUG", "FATAL": "CRITICAL"} | {level: level for level in ("DEBUG", "INFO", "WARNING", "ERROR")}
_CYCLES, _SHORT_CYCLES = 1000, 100  # a message costs more here than in Horovod


@dataclass(frozen=True)
class Settings:
    """The settings of a job's engine."""

    fusion_bytes: int = 128 << 20
    cache_capacity: int = 1024
    gather_seconds: float = 1.0  # how long submissions are collected while no rank waits for them
    short_gather_seconds: float = 0.1  # the same while another rank waits
    gather_bytes: int = 25 << 20  # or until they have this size
    stall_warning_seconds: float | None = 60.0
    stall_shutdown_seconds: float = 0.0  # 0: never
    log_level: str = ""
    timeline: str = ""  # the file of a timeline that starts with the job
    marks_cycles: bool = False
    dynamic_sets: bool = False  # process sets may be added and removed while the job runs


def read_settings(env: Mapping[str, str]) -> Settings:
    """Read the settings from environment variables; a value that is not valid is an error that names the variable."""
    timeline = env.get("HOROVOD_TIMELINE", "")
    cycle_seconds = read_number(env, "CYCLE_TIME", 1.0) / 1000
    return Settings(
        fusion_bytes=int(read_number(env, "FUSION_THRESHOLD", 128 << 20)),
        cache_capacity=int(read_number(env, "CACHE_CAPACITY", 1024)),
        gather_seconds=_CYCLES * cycle_seconds,
        short_gather_seconds=_SHORT_CYCLES * cycle_seconds,
        stall_warning_seconds=None
        if _is_set(env, "STALL_CHECK_DISABLE")
        else read_number(env, "STALL_CHECK_TIME_SECONDS", 60.0),
        stall_shutdown_seconds=read_number(env, "STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        log_level=_log_level(env),
        timeline="" if timeline.upper() == "DYNAMIC" else timeline,
        marks_cycles=_is_set(env, "TIMELINE_MARK_CYCLES"),
        dynamic_sets=_is_set(env, "DYNAMIC_PROCESS_SETS"),
    )


def read_number(env: Mapping[str, str], name: str, default: float) -> float:
    """Read a number, 0 or more, from an environment variable; any other value is an error that names the variable."""
    given = env.get(f"HOROVOD_{name}") or str(default)
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"HOROVOD_{name}={given!r}: expected a number, 0 or more. Correct it, or unset it.")
    return value


def _log_level(env: Mapping[str, str]) -> str:
    """Return the name of a level of Python's logging, or an empty string."""
    given = env.get("HOROVOD_LOG_LEVEL", "").upper()
    if given and given not in LOG_LEVELS:
        known = ", ".join(level.lower() for level in LOG_LEVELS)
        raise ValueError(f"HOROVOD_LOG_LEVEL={given.lower()!r}: expected one of {known}. Correct it, or unset it.")
    return LOG_LEVELS.get(given, "")


def _is_set(env: Mapping[str, str], name: str) -> bool:
    return env.get(f"HOROVOD_{name}", "0") not in ("0", "")


@dataclass(frozen=True)
class FlagSetting:
    """A flag, the variable it sets, and its key in the YAML file."""

    flag: str
    kind: type
    section: str  # of the YAML file
    help: str = ""  # empty for a flag that is accepted without effect
    other_variable: str = ""  # where it is not the flag in capitals
    other_key: str = ""  # where it is not the flag without the name of the section
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        return self.other_variable or self.name.upper()

    @property
    def key(self) -> str:
        return f"{self.section}.{self.other_key or self.name.removeprefix(f'{self.section}_')}"


_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_STALLED = "warn of ranks that do not submit an operation"
_STALL_END = "when to end the job; 0 is never"
_LEVEL = "the lowest level of messages that ranks print"
_SECONDS = "STALL_CHECK_TIME_SECONDS"
SETTINGS = (
    FlagSetting("--fusion-threshold-mb", int, "params", "MiB of tensors in one message", "FUSION_THRESHOLD"),
    FlagSetting("--cycle-time-ms", float, "params", "milliseconds to collect tensors", "CYCLE_TIME"),
    FlagSetting("--cache-capacity", int, "params", "tensors that are sent by number"),
    FlagSetting("--hierarchical-allreduce", bool, "params"),
    FlagSetting("--hierarchical-allgather", bool, "params"),
    FlagSetting("--torus-allreduce", bool, "params"),
    FlagSetting("--autotune", bool, "autotune", other_key="enabled"),
    FlagSetting("--autotune-log-file", str, "autotune", other_variable="AUTOTUNE_LOG"),
    FlagSetting("--autotune-warmup-samples", int, "autotune"),
    FlagSetting("--autotune-steps-per-sample", int, "autotune"),
    FlagSetting("--autotune-bayes-opt-max-samples", int, "autotune"),
    FlagSetting("--autotune-gaussian-process-noise", float, "autotune"),
    FlagSetting("--timeline-filename", str, "timeline", "file of a Chrome trace, written by rank 0", "TIMELINE"),
    FlagSetting("--timeline-mark-cycles", bool, "timeline", "mark cycles in it"),
    FlagSetting("--stall-check", bool, "stall_check", _STALLED, "STALL_CHECK_DISABLE", "enabled"),
    FlagSetting("--stall-check-warning-time-seconds", int, "stall_check", "when to warn", _SECONDS),
    FlagSetting("--stall-check-shutdown-time-seconds", int, "stall_check", _STALL_END, "STALL_SHUTDOWN_TIME_SECONDS"),
    FlagSetting("--mpi-threads-disable", bool, "library_options"),
    FlagSetting("--num-nccl-streams", int, "library_options"),
    FlagSetting("--thread-affinity", str, "library_options"),
    FlagSetting("--gloo-timeout-seconds", int, "library_options"),
    FlagSetting("--log-level", str, "logging", _LEVEL, other_key="level", choices=_LEVELS),
    FlagSetting("--log-with-timestamp", bool, "logging", "", "LOG_HIDE_TIME", "timestamp"),
)
_INVERTED = ("STALL_CHECK_DISABLE", "LOG_HIDE_TIME")  # the variable is true where the flag is not given
_OTHER_OFF_FLAGS = {"--log-with-timestamp": "--log-without-timestamp"}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser; a boolean flag has an opposite."""
    group = parser.add_argument_group("settings of the ranks (HOROVOD_* variables)")
    for setting in SETTINGS:
        text = setting.help or "accepted without effect"
        if setting.kind is bool:
            off = _OTHER_OFF_FLAGS.get(setting.flag, setting.flag.replace("--", "--no-", 1))
            group.add_argument(setting.flag, dest=setting.name, action="store_true", default=None, help=text)
            group.add_argument(off, dest=setting.name, action="store_false", default=None, help="the opposite")
        else:
            group.add_argument(setting.flag, type=setting.kind, choices=setting.choices or None, help=text)


def settings_environment(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that the given flags set."""
    environment = {}
    for setting in SETTINGS:
        value = given.get(setting.name)
        if value is None:
            continue
        if setting.kind in (int, float) and value < 0:
            raise ConfigError(f"{setting.flag} {value}: expected 0 or more.")
        if setting.variable == "FUSION_THRESHOLD":
            value = value << 20
        if setting.kind is bool:
            value = int(value != (setting.variable in _INVERTED))
        environment[f"HOROVOD_{setting.variable}"] = str(value)
    return environment


def without_meaning(given: Mapping[str, Any]) -> list[str]:
    """Return the given flags that have no effect here."""
    return [setting.flag for setting in SETTINGS if not setting.help and given.get(setting.name) is not None]


def read_settings_file(path: str) -> dict[str, Any]:
    """Read the settings of a YAML file, by the names of their flags."""
    content = read_yaml(Path(path), "--config-file")
    known = {setting.key: setting for setting in SETTINGS}
    known["logging.hide_timestamp"] = known["logging.timestamp"]
    found: dict[str, Any] = {}
    for key, value in _flat(content or {}, path).items():
        if key == "verbose":
            found[key] = bool(value)
            continue
        if key not in known:
            raise ConfigError(
                f"--config-file {path}: {key} is not a setting.{nearest(key, known)} "
                f"Expected some of {', '.join(sorted(known))}."
            )
        setting = known[key]
        if value is not None and not isinstance(value, (int, float) if setting.kind is float else setting.kind):
            raise ConfigError(
                f"--config-file {path}: {key}: {value!r}. Expected a value of type {setting.kind.__name__}."
            )
        if setting.choices and value not in setting.choices:
            raise ConfigError(f"--config-file {path}: {key}: {value!r}. Expected one of {', '.join(setting.choices)}.")
        found[setting.name] = not value if key == "logging.hide_timestamp" else value
    return found


def _flat(content: Any, path: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"--config-file {path}: expected sections such as 'params:' with settings under them.")
    flat: dict[str, Any] = {}
    for section, values in content.items():
        if isinstance(values, dict):
            flat |= {f"{section}.{name}": value for name, value in values.items()}
        else:
            flat[str(section)] = values
    return flat
