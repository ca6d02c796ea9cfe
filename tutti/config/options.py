"""The options of datasets, optimizers and losses by name, and where they are implemented; none is imported here."""

import functools
import importlib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from tutti.config.schema import Count, Fraction, LocalDisk, Natural, NonNegative, Positive, Section, Seed, Switch
from tutti.errors import ConfigError, nearest

FRAMEWORKS = {
    "torch": "PyTorch, with gradients averaged by DistributedDataParallel.",
    "keras": "Keras 3 and its `fit`, on backend=tensorflow, torch or jax.",
    "tensorflow": "TensorFlow 2, with a gradient tape in tutti's own loop.",
}


def locate(target: str) -> Any:
    """Import `package.module:object`; an error of the module is shown as it is."""
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{target!r}: importing {module_name!r} failed with {type(error).__name__}: {error}. "
            "Check the name, and that the module is on the Python path (PYTHONPATH, or installed)."
        ) from error
    for word in path.split("."):
        if not hasattr(found, word):
            public = [name for name in dir(found) if not name.startswith("_")]
            raise ConfigError(f"{target!r}: {module_name!r} has no {word!r}.{nearest(word, public)}")
        found = getattr(found, word)
    if not callable(found):
        raise ConfigError(f"{target!r} is a {type(found).__name__}: expected something to call, a class or a function.")
    return found


class PartOptions(Section):
    """A part named in a recipe, with its options beside the name."""

    target: ClassVar[str] = ""
    keras_target: ClassVar[str] = ""  # the same part in Keras, for the frameworks keras and tensorflow
    name: str

    @classmethod
    def frameworks(cls) -> tuple[str, ...]:
        """The frameworks in which the part exists."""
        return tuple(FRAMEWORKS) if cls.keras_target else ("torch",)

    def options(self) -> dict[str, Any]:
        """The keyword arguments that the recipe gives to the part."""
        return self.model_dump(exclude={"name"})

    def locate(self) -> Any:
        """Import the object behind the name."""
        return locate(self.target or self.name)

    def locate_in_keras(self) -> Any:
        """Import the Keras version of the object behind the name."""
        return locate(self.keras_target)


class UserPartOptions(PartOptions):
    """A user's own object, named `package.module:object`; its options are passed as keyword arguments."""

    model_config = ConfigDict(extra="allow")


class StepOptions(UserPartOptions):
    """A user's own training step, a function named `package.module:function`; its options are keyword arguments."""

    @field_validator("name")
    @classmethod
    def _is_own(cls, name: str) -> str:
        if ":" not in name:
            raise ValueError(f"{name!r}: expected module:function, a training step of your own.")
        return name


class DatasetOptions(PartOptions):
    """A source of training and validation samples."""

    workers: Natural = 0  # loader processes on each rank, for datasets read sample by sample
    prefetch: Natural | None = None  # batches to prefetch; null: chosen by the device
    # stored: a permutation of all samples; keyed: a function of the position, in constant memory; auto: by their number
    shuffle: Literal["auto", "stored", "keyed", "blocks"] = "auto"
    shuffle_block: Count | None = None  # blocks: samples in a block; null: the shards of the dataset
    shuffle_window: Count = 8  # blocks: how many of them are mixed

    @classmethod
    def frameworks(cls) -> tuple[str, ...]:
        return tuple(FRAMEWORKS) if cls.target else ("torch",)

    def options(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude=set(DatasetOptions.model_fields))

    def train_samples(self) -> int | None:
        """The number of training samples, if it is known without reading data."""
        return None

    def prepare(self) -> None:
        """Create missing data, if the recipe allows it; rank 0 calls this before the others look for data."""


class DigitsOptions(DatasetOptions):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; no download."""

    target = "tutti.data.builtin:digits"
    name: Literal["digits"] = "digits"
    shift: Natural = 0  # random shift of the training images, in pixels

    def train_samples(self) -> int:
        return 1437


class SyntheticOptions(DatasetOptions):
    """Random samples of any shape with labels that can be learned; no download."""

    target = "tutti.data.builtin:synthetic"
    name: Literal["synthetic"] = "synthetic"
    shape: tuple[Count, ...] = (3, 64, 64)
    classes: Count = 10
    train: Count = 1024
    valid: Count = 1024
    noise: NonNegative = 1.0  # spread of the samples around the mean of their class
    seed: Seed = 0

    def train_samples(self) -> int:
        return self.train


class MnistOptions(DatasetOptions):
    """MNIST from its IDX files, gzipped or not: 60,000 training and 10,000 test images."""

    target = "tutti.data.mnist:mnist"
    name: Literal["mnist"] = "mnist"
    path: str = "data/mnist"
    shift: Natural = 0  # random shift of the training images, in pixels

    def train_samples(self) -> int:
        return 60_000


class Cifar10Options(DatasetOptions):
    """CIFAR-10 from its binary or Python files, or from images: 50,000 for training, 10,000 for test."""

    target = "tutti.data.cifar10:cifar10"
    name: Literal["cifar10"] = "cifar10"
    path: str = "data/cifar10"  # a folder, or an archive
    shift: Natural = 0  # random shift of the training images, in pixels
    flip: Literal[True, False, "alternate"] = (
        False  # mirror half of the training images; alternate: the other half in the next epoch
    )
    fill: Literal["zero", "edge", "reflect"] = "edge"  # pixels outside of the image
    cache: str | None = None  # folder for decoded images; null: TUTTI_CACHE or ~/.cache/tutti


class ImagesOptions(DatasetOptions):
    """Images of classes, such as ImageNet: a folder for each class, or packed; read by worker processes."""

    target = "tutti.data.image_tree:image_tree"
    name: Literal["images"] = "images"
    path: str = "data/imagenet"  # with train/ and validation/, or written by tutti data pack
    size: Count = 224
    augment: Literal["crop", "shift_zoom", "none"] = "crop"
    scale: tuple[Positive, Positive] = (0.08, 1.0)  # crop: its share of the image
    ratio: tuple[Positive, Positive] = (0.75, 1.3333)  # crop: width over height
    shift: NonNegative = 0.33  # shift_zoom: of height and width
    zoom: Fraction = 0.5  # shift_zoom: a factor from 1 - zoom to 1 + zoom for each axis
    flip: Switch = True
    centre: Positive = 0.875  # the part of the shorter side that is used in validation
    classes: Count | None = None  # only the first so many by name
    corrupt: Literal["refuse", "skip"] = "refuse"
    stage: LocalDisk | None = None  # a folder of a disk of the host, to which the shards of a packed dataset are copied
    keep_staged: Switch = False  # leave the copies there at the end of the run


class PackedOptions(DatasetOptions):
    """Arrays that `tutti data pack module:object FOLDER` has packed."""

    target = "tutti.data.packed.arrays:packed_arrays"
    name: Literal["packed"] = "packed"
    path: str = "data/packed"
    stage: LocalDisk | None = None
    keep_staged: Switch = False


class NbodyOptions(DatasetOptions):
    """Crops of matched N-body and hydro boxes in HDF5 files, rotated by the symmetries of the cube."""

    target = "tutti.data.nbody.dataset:nbody"
    name: Literal["nbody"] = "nbody"
    train: str = "data/nbody/train.h5"
    valid: str = "data/nbody/valid.h5"
    source: Literal["auto", "synthetic", "memory", "disk", "device"] = "auto"
    crop: Count = 64
    train_samples_: Count = Field(default=65536, alias="train_samples")
    valid_samples: Count = 8192
    symmetries: Switch = True
    vectors: Switch = True  # velocities rotate with the axes; false leaves them, as the tutorials do
    rounded: Switch = True  # inputs have the run's precision, to which a first convolution rounds them anyway
    box: Annotated[int, Field(strict=True, ge=16)] = 128  # side of a created box, or of random numbers
    make: Switch = False  # create missing boxes

    @classmethod
    def frameworks(cls) -> tuple[str, ...]:
        return ("torch",)

    def train_samples(self) -> int:
        return self.train_samples_

    def prepare(self) -> None:
        if self.make and self.source != "synthetic":
            locate("tutti.data.nbody.dataset:make_missing")(self.train, self.valid, self.box)


class TextOptions(DatasetOptions):
    """Generated sentences with agreement, nested clauses and sums, as characters; no download."""

    target = "tutti.data.text:text"
    name: Literal["text"] = "text"
    context: Count = 128  # characters of a sample, each of which predicts the next
    characters: Annotated[int, Field(strict=True, ge=1000)] = 500_000  # of the text; a tenth of it is for validation
    seed: Seed = 0

    @classmethod
    def frameworks(cls) -> tuple[str, ...]:
        return ("torch",)

    def train_samples(self) -> int:
        return (self.characters - self.characters // 10 - 1) // self.context


class UserDatasetOptions(DatasetOptions, UserPartOptions):
    """A user's own dataset, named `package.module:object`."""


class OptimizerOptions(PartOptions):
    """A rule that turns gradients into new weights."""

    lr: Positive
    clip_norm: Positive | None = None

    def options(self) -> dict[str, Any]:
        return self.model_dump(exclude={"name", "clip_norm"})


class SgdOptions(OptimizerOptions):
    """Stochastic gradient descent with optional (Nesterov) momentum."""

    target = "torch.optim:SGD"
    keras_target = "tutti.frameworks.optimizers:sgd"
    name: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: Switch = False


class AdamOptions(OptimizerOptions):
    """Adam."""

    target = "torch.optim:Adam"
    keras_target = "tutti.frameworks.optimizers:adam"
    name: Literal["adam"] = "adam"
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0


class AdamWOptions(AdamOptions):
    """Adam with decoupled weight decay."""

    target = "torch.optim:AdamW"
    keras_target = "tutti.frameworks.optimizers:adamw"
    name: Literal["adamw"] = "adamw"
    weight_decay: NonNegative = 0.01


class LarsOptions(OptimizerOptions):
    """LARS: momentum with a rate for each layer, in proportion to its weights; for large batches."""

    target = "tutti.optim.layerwise:Lars"
    name: Literal["lars"] = "lars"
    momentum: Fraction = 0.9
    weight_decay: NonNegative = 5e-4
    eta: Positive = 1e-3  # the trust coefficient; biases and norms, of one dimension, move by lr itself


class LambOptions(OptimizerOptions):
    """LAMB: Adam's direction with a rate for each layer, in proportion to its weights; for large batches."""

    target = "tutti.optim.layerwise:Lamb"
    name: Literal["lamb"] = "lamb"
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-6
    weight_decay: NonNegative = 0.01


class MuonOptions(OptimizerOptions):
    """Muon: momentum whose matrices are orthogonalised; `others` names what updates all but hidden weights."""

    target = "tutti.optim.muon:Muon"
    name: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    nesterov: Switch = True
    weight_decay: NonNegative = 0.0  # decoupled, of matrices
    ns_steps: Annotated[int, Field(strict=True, ge=1, lt=100)] = 5  # of the Newton-Schulz iteration
    ns_precision: Literal["bf16", "fp32"] | None = None  # of that iteration; null: bf16 on GPUs, fp32 on CPUs
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"  # the factor of a matrix, by its shape
    normalize: Switch = False  # before each step, scale a matrix of n rows to a norm of sqrt(n)
    others: Annotated[SgdOptions | AdamOptions | AdamWOptions, Field(discriminator="name")] | None = None

    @field_validator("others")
    @classmethod
    def _clips_all(cls, others: OptimizerOptions | None) -> OptimizerOptions | None:
        if others is not None and others.clip_norm is not None:
            raise ValueError(
                f"clip_norm={others.clip_norm:g} of a part of the gradient: expected none. Set optim.clip_norm="
                f"{others.clip_norm:g}, which clips the gradient of all parameters."
            )
        return others

    def options(self) -> dict[str, Any]:
        return self.model_dump(exclude={"name", "clip_norm", "others"})


class UserOptimizerOptions(OptimizerOptions, UserPartOptions):
    """A user's own optimizer, named `package.module:object`: of torch, or of Keras for the frameworks on it."""

    keras_target = "tutti.frameworks.optimizers:named"

    def locate_in_keras(self) -> Any:
        return functools.partial(super().locate_in_keras(), self.name)


class CrossEntropyOptions(PartOptions):
    """Cross entropy of class scores, with optional label smoothing."""

    target = "tutti.train.metrics:CrossEntropy"
    keras_target = "tutti.frameworks.learner:cross_entropy"
    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: Fraction = 0.0


class MseOptions(PartOptions):
    """Mean squared error."""

    target = "torch.nn:MSELoss"
    name: Literal["mse"] = "mse"


class L1Options(PartOptions):
    """Mean absolute error, with an optional share for the density whose logarithm is channel 0."""

    target = "tutti.train.metrics:L1Loss"
    name: Literal["l1"] = "l1"
    lambda_rho: NonNegative = 0.0
