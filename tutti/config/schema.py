"""The sections of a recipe and the types of their values; frozen, and unknown keys are refused."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

LARGEST_SEED = 2**63 - 1  # accepted by torch, NumPy and Keras, also with small offsets


def _check_seed(seed: int) -> int:
    if not 0 <= seed <= LARGEST_SEED:
        raise PydanticCustomError(
            "seed", "a whole number from 0 to {largest}, for example 42", {"largest": LARGEST_SEED}
        )
    return seed


def _check_local_disk(folder: str) -> str:
    if not folder.startswith(("/", "~", "$")):
        raise PydanticCustomError(
            "local_disk",
            "an absolute path or one that begins with a variable of the hosts, for example /local/scratch or $TMPDIR",
        )
    return folder


Count = Annotated[int, Field(strict=True, gt=0)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Seed = Annotated[int, Field(strict=True), AfterValidator(_check_seed)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1)]
Switch = Annotated[bool, Field(strict=True)]
LocalDisk = Annotated[str, AfterValidator(_check_local_disk)]  # a folder that each host has for itself
Where = Literal[True, False, "gpu"]  # on every device, on none, or only on GPUs


class Section(BaseModel):
    """A group of keys in a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class BatchConfig(Section):
    """How many samples a step takes: over all ranks (`global`) or on each (`per_rank`)."""

    global_batch: Count | None = Field(default=None, alias="global")
    per_rank: Count | None = None
    micro: Count | None = None  # samples in one forward pass; fixes dropout and batch-norm statistics
    base: Count | None = None  # the global batch for which optim.lr was chosen
    eval: Count | None = None  # samples in one forward pass of validation, on each rank

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if (self.global_batch is None) == (self.per_rank is None):
            raise ValueError("expected exactly one of batch.global and batch.per_rank.")
        return self


class ScheduleConfig(Section):
    """The learning rate over the steps: scaling, then warm-up, then decay."""

    scaling: Literal["none", "linear", "sqrt"] = "none"
    warmup_steps: Natural | None = None
    warmup_epochs: NonNegative | None = None
    warmup_from: Literal["unscaled", "zero"] = "unscaled"
    warmup: Literal["ramp", "hold"] = "ramp"  # hold: the unscaled rate during the warm-up, then the scaled one at once
    shorten_warmup: bool = False  # a warm-up longer than the run is shortened to it instead of refused
    decay: Literal["constant", "cosine", "linear", "step"] = "constant"
    end_lr: NonNegative = 0.0
    milestones: tuple[NonNegative, ...] = ()  # epochs at which `step` decay multiplies the rate
    factor: Positive = 0.1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise ValueError("expected at most one of schedule.warmup_steps and schedule.warmup_epochs.")
        if self.warmup == "hold" and self.warmup_from == "zero":
            raise ValueError(
                "expected schedule.warmup_from=unscaled with schedule.warmup=hold, or schedule.warmup=ramp."
            )
        if (self.decay == "step") != bool(self.milestones):
            raise ValueError("expected schedule.milestones exactly when schedule.decay is 'step'.")
        if list(self.milestones) != sorted(self.milestones):
            raise ValueError("expected schedule.milestones in rising order.")
        return self


MOST_DIRECT_BYTES = 1 << 20  # of a bucket, over all ranks; measured on 2 and 4 ranks of one host


class DdpConfig(Section):
    """How gradients are averaged over ranks."""

    bucket_mb: Positive | None = None  # null: torch's default, 25 with a first bucket of 1
    direct: Switch = True  # CPU ranks of one host average a small last bucket through shared memory
    broadcast_buffers: Switch = False
    communicate: Switch = True  # false measures steps without communication; weights of ranks then diverge
    find_unused_parameters: Switch = False


class ParallelConfig(Section):
    """How ranks share weights, samples and layers where data parallelism alone needs too much memory."""

    shard: Literal["none", "host", "all"] | Count = "none"  # ranks over which weights and optimizer state are sharded
    space: Count | Annotated[tuple[Count, ...], Field(min_length=1, max_length=3)] = 1  # parts of a sample
    stages: Count = 1  # parts of the model, one after another; their micro-batches are those of batch.micro
    tensor: Count = 1  # parts of each layer on ranks of a host, in models with the method tensor_plan()
    sequence: Count = 1  # parts of a sequence, in models with sequence_plan(); attention exchanges them for heads
    recompute: Literal["none", "layers"] | Positive = "none"  # activations: of all layers, or beyond so many GiB
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"  # of stages

    @field_validator("space", mode="before")
    @classmethod
    def _check_space(cls, value: Any) -> Any:
        parts = value if isinstance(value, list | tuple) else [value]
        if not 1 <= len(parts) <= 3 or not all(type(each) is int and each > 0 for each in parts):
            raise PydanticCustomError("space", "a number of parts, 1 or more, or up to 3 such numbers, as in [2,2,1]")
        return value

    @property
    def space_parts(self) -> tuple[int, ...]:
        """The parts of a sample along its first dimensions in space."""
        return (self.space,) if isinstance(self.space, int) else self.space


SAFETENSORS = (".safetensors",)
TORCH_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt")
KERAS_WEIGHTS = (".keras", ".weights.h5")


class InitConfig(Section):
    """The weights with which a new run begins; a run that is resumed has its own."""

    source: Annotated[str, Field(min_length=1)] = Field(alias="from")  # a run folder, a checkpoint in one, or a file
    checkpoint: Literal["best", "last"] | Count = "best"  # of a run folder; the last where none was saved as the best
    strict: Switch = True  # every chosen weight of the model is there with its shape
    only: str | tuple[str, ...] = "*"  # patterns of the names of the weights that are taken, such as "backbone.*"


class SpeedConfig(Section):
    """Settings that make a step faster without changing the trained model."""

    channels_last: Where = "gpu"  # the channels-last memory format, in which convolutions are fastest
    compile: Where = False  # model and loss by torch.compile, which slows the start
    graphs: Where = False  # with compile: CUDA graphs, for steps limited by kernel launches
    fold: Where = "gpu"  # layers with few channels in a faster form, in models that have one


class CheckpointConfig(Section):
    """When a checkpoint is saved, and how many are kept."""

    every_steps: Count | None = None
    every_epochs: Count | None = 1
    keep: Count = 2
    best: str | None = None  # a validation metric whose best checkpoint is kept in addition to the newest


class EmaConfig(Section):
    """The exponential moving average of weights, evaluated and saved beside them."""

    decay: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.999  # the share of the average that a step keeps


class StopEarlyConfig(Section):
    """When a run ends because a validation metric no longer improves."""

    metric: str = "valid_loss"
    patience: Count  # epochs without an improvement
    min_change: NonNegative = 0.0  # by which a value has to be better than the best one


class LogConfig(Section):
    """What is written while training."""

    every_steps: Count = 50
    ledger: Switch = False  # sample ids of every step, for debugging
    to: tuple[Literal["tensorboard", "csv", "wandb", "mlflow"], ...] = ("tensorboard",)
    tensorboard: Switch = True  # false leaves tensorboard out of `to`
    phases: Switch = True  # the time of each part of a step, and stragglers
    noise_scale: Switch = False  # the gradient noise scale, in every tenth step
    profile: tuple[Count, Count] | None = None  # the first and the last step of a trace by TensorFlow's profiler

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.profile is not None and self.profile[0] > self.profile[1]:
            raise ValueError("expected log.profile as [FIRST, LAST] with the first step not after the last.")
        return self

    @property
    def loggers(self) -> tuple[str, ...]:
        """The loggers that copy metrics.jsonl, each once."""
        return tuple(dict.fromkeys(name for name in self.to if name != "tensorboard" or self.tensorboard))


class RuntimeConfig(Section):
    """Device, threads and cores of the ranks, and their timeouts."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count | None = None
    deterministic: Switch = False  # on a GPU, only deterministic kernels; slower
    start_timeout_seconds: Positive = 300.0
    timeout_seconds: Positive = 600.0
    margin_seconds: NonNegative = 30.0  # before the end of the allocation, in addition to the time of a checkpoint
    straggler_factor: Positive = 1.5  # a rank that computes this much longer than the others is reported
    binding: Literal["none", "compact", "spread"] = "none"  # cores of the host to ranks
