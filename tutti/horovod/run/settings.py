"""The flags of `horovodrun` that become HOROVOD_* variables of the ranks, on the command line or in a YAML file."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.config.recipes import read_yaml
from tutti.errors import ConfigError, nearest


@dataclass(frozen=True)
class Setting:
    """A flag, the variable it sets, and its place in the YAML file."""

    flag: str
    kind: type
    variable: str
    key: str  # section.name
    help: str
    used: bool = True  # otherwise accepted, without a meaning for this implementation
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
SETTINGS = (
    Setting("--fusion-threshold-mb", int, "FUSION_THRESHOLD", "params.fusion_threshold_mb", "MiB that go together"),
    Setting("--cycle-time-ms", float, "CYCLE_TIME", "params.cycle_time_ms", "milliseconds in which tensors gather"),
    Setting("--cache-capacity", int, "CACHE_CAPACITY", "params.cache_capacity", "tensors told by number"),
    Setting("--hierarchical-allreduce", bool, "HIERARCHICAL_ALLREDUCE", "params.hierarchical_allreduce", "", False),
    Setting("--hierarchical-allgather", bool, "HIERARCHICAL_ALLGATHER", "params.hierarchical_allgather", "", False),
    Setting("--torus-allreduce", bool, "TORUS_ALLREDUCE", "params.torus_allreduce", "", False),
    Setting("--autotune", bool, "AUTOTUNE", "autotune.enabled", "", False),
    Setting("--autotune-log-file", str, "AUTOTUNE_LOG", "autotune.log_file", "", False),
    Setting("--autotune-warmup-samples", int, "AUTOTUNE_WARMUP_SAMPLES", "autotune.warmup_samples", "", False),
    Setting("--autotune-steps-per-sample", int, "AUTOTUNE_STEPS_PER_SAMPLE", "autotune.steps_per_sample", "", False),
    Setting(
        "--autotune-bayes-opt-max-samples",
        int,
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "autotune.bayes_opt_max_samples",
        "",
        False,
    ),
    Setting(
        "--autotune-gaussian-process-noise",
        float,
        "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "autotune.gaussian_process_noise",
        "",
        False,
    ),
    Setting("--timeline-filename", str, "TIMELINE", "timeline.filename", "file of a Chrome trace, by rank 0"),
    Setting("--timeline-mark-cycles", bool, "TIMELINE_MARK_CYCLES", "timeline.mark_cycles", "mark cycles in it"),
    Setting("--stall-check", bool, "STALL_CHECK_DISABLE", "stall_check.enabled", "warn of ranks that do not come"),
    Setting(
        "--stall-check-warning-time-seconds",
        int,
        "STALL_CHECK_TIME_SECONDS",
        "stall_check.warning_time_seconds",
        "when to warn of them",
    ),
    Setting(
        "--stall-check-shutdown-time-seconds",
        int,
        "STALL_SHUTDOWN_TIME_SECONDS",
        "stall_check.shutdown_time_seconds",
        "when to end the job because of them; 0 is never",
    ),
    Setting("--mpi-threads-disable", bool, "MPI_THREADS_DISABLE", "library_options.mpi_threads_disable", "", False),
    Setting("--num-nccl-streams", int, "NUM_NCCL_STREAMS", "library_options.num_nccl_streams", "", False),
    Setting("--thread-affinity", str, "THREAD_AFFINITY", "library_options.thread_affinity", "", False),
    Setting("--gloo-timeout-seconds", int, "GLOO_TIMEOUT_SECONDS", "library_options.gloo_timeout_seconds", "", False),
    Setting(
        "--log-level", str, "LOG_LEVEL", "logging.level", "the least grave messages that ranks print", choices=_LEVELS
    ),
    Setting("--log-with-timestamp", bool, "LOG_HIDE_TIME", "logging.timestamp", "", False),
)
_INVERTED = ("STALL_CHECK_DISABLE", "LOG_HIDE_TIME")  # the flag says yes where the variable says no
_OTHER_OFF_FLAGS = {"--log-with-timestamp": "--log-without-timestamp"}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The flags; switches have an opposite."""
    group = parser.add_argument_group("settings of the ranks (HOROVOD_* variables)")
    for setting in SETTINGS:
        text = setting.help or "accepted; without a meaning here"
        if setting.kind is bool:
            off = _OTHER_OFF_FLAGS.get(setting.flag, setting.flag.replace("--", "--no-", 1))
            group.add_argument(setting.flag, dest=setting.name, action="store_true", default=None, help=text)
            group.add_argument(off, dest=setting.name, action="store_false", default=None, help="the opposite")
        else:
            group.add_argument(setting.flag, type=setting.kind, choices=setting.choices or None, help=text)


def settings_environment(given: Mapping[str, Any]) -> dict[str, str]:
    """The variables for the flags that were given."""
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
    """The settings that were given and change nothing here."""
    return [setting.flag for setting in SETTINGS if not setting.used and given.get(setting.name) is not None]


def read_settings(path: str) -> dict[str, Any]:
    """The settings of a YAML file, by the names of their flags."""
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
                f"--config-file {path}: {key} is no setting.{nearest(key, known)} "
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
