"""One whole run: every section of a recipe, validated and frozen."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, TypeAdapter, field_validator

from tutti.config.options import DatasetOptions, StepOptions, locate
from tutti.config.parts import METRICS, CrossEntropyOptions, DatasetPart, LossPart, ModelPart, OptimizerPart
from tutti.config.recipes import dump_yaml
from tutti.config.schema import (
    BatchConfig,
    CheckpointConfig,
    Count,
    DdpConfig,
    EmaConfig,
    InitConfig,
    LogConfig,
    Number,
    ParallelConfig,
    RuntimeConfig,
    ScheduleConfig,
    Section,
    Seed,
    SpeedConfig,
    StopEarlyConfig,
)
from tutti.errors import nearest
from tutti.units import EMA

_DATASET: TypeAdapter[DatasetOptions] = TypeAdapter(DatasetPart)
LOOP = ":loop"  # ends the names of model and optimizer where a script trains them in a loop of its own


class RunConfig(Section):
    """The configuration of a run, independent of ranks and machines."""

    recipe: str = "unnamed"
    framework: Literal["torch", "keras", "tensorflow"] = "torch"
    backend: Literal["tensorflow", "torch", "jax"] | None = None  # of Keras; null: tensorflow
    data: DatasetPart
    valid: dict[str, dict[str, Any]] | None = None  # further validation sets by name: `data` with other options
    model: ModelPart
    loss: LossPart = CrossEntropyOptions()
    metrics: tuple[str, ...] = ("accuracy",)
    optim: OptimizerPart
    step: StepOptions | None = None  # module:function, which makes a training step in place of loss and optimizer
    init: InitConfig | None = None  # weights to begin with
    batch: BatchConfig
    schedule: ScheduleConfig = ScheduleConfig()
    epochs: Count
    max_steps: Count | None = None  # the run ends after so many if its epochs have more
    stop_at: dict[str, Number] | None = None  # a validation metric and the value at which the run ends
    stop_early: StopEarlyConfig | None = None
    ema: EmaConfig | None = None
    seed: Seed = 42
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    speed: SpeedConfig = SpeedConfig()
    ddp: DdpConfig = DdpConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    out: str = Field(default="runs", min_length=1)

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if ":" not in name and name not in METRICS:
                known = ", ".join(METRICS)
                raise ValueError(f"unknown metric {name!r}: expected {known} or module:object.{nearest(name, METRICS)}")
        return names

    @field_validator("valid")
    @classmethod
    def _named_sets(cls, sets: dict[str, dict[str, Any]] | None) -> dict[str, dict[str, Any]] | None:
        for name, given in (sets or {}).items():
            if not name.isidentifier() or name in ("train", "valid", "test"):
                raise ValueError(f"the name {name!r}: expected letters, digits and underscores, and no split.")
            if common := [key for key in given if key in DatasetOptions.model_fields and key != "name"]:
                raise ValueError(f"{name}.{common[0]}: expected options of the dataset. Set data.{common[0]} for all.")
        return sets

    @field_validator("step", mode="before")
    @classmethod
    def _named_step(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @field_validator("stop_at", mode="before")
    @classmethod
    def _one_target(cls, given: Any) -> Any:
        if given is not None and not (isinstance(given, dict) and len(given) == 1):
            raise ValueError(f"expected one metric with its value, as in {{valid_accuracy: 0.95}}, not {given!r}.")
        return given

    def measured(self, metrics: Iterable[str]) -> list[str]:
        """What a run with these metrics measures in validation: `loss`, the metrics, and those of averaged weights.

        Names of further validation sets come before those of their metrics, as in `shifted_loss`.
        """
        own = [name.rpartition(":")[2] for name in ("loss", *metrics)]
        names = [f"{place}{name}" for place in ("", *(f"{each}_" for each in self.valid or ())) for name in own]
        return names + ([f"{name}{EMA}" for name in names] if self.ema else [])

    def valid_set(self, name: str) -> DatasetOptions:
        """A further validation set; raises ValidationError for options that its dataset does not have."""
        given = (self.valid or {})[name]
        own = self.data.model_dump(by_alias=True) if given.get("name", self.data.name) == self.data.name else {}
        return _DATASET.validate_python(own | given)

    def valid_sets(self) -> dict[str, DatasetOptions]:
        """The further validation sets by name."""
        return {name: self.valid_set(name) for name in self.valid or ()}

    def metric_functions(self) -> dict[str, Any]:
        """The metrics by their short names."""
        return {name.rpartition(":")[2]: locate(METRICS[name][0] if name in METRICS else name) for name in self.metrics}

    @property
    def script(self) -> str | None:
        """The name of the script that trains in a loop of its own, if one does."""
        return self.model.name.removesuffix(LOOP) if self.model.name == self.optim.name else None

    def resume_line(self, folder: Path) -> str:
        """What continues a run in a folder."""
        if self.script is None:
            return f"tutti train {folder}"
        return f"the script {self.script}, with tutti.start(..., resume={str(folder)!r})"

    def as_yaml(self) -> str:
        """The configuration as the text of a recipe; options of user parts keep types of YAML, such as dates."""
        try:
            return dump_yaml(self.model_dump(by_alias=True))
        except yaml.representer.RepresenterError:  # a Path, for example, which is written as text
            return dump_yaml(self.plain())

    def plain(self) -> dict[str, Any]:
        """The configuration as plain values, with the keys of a recipe."""
        return self.model_dump(mode="json", by_alias=True)
