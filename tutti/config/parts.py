"""The parts that a recipe chooses by name, section by section; none of them is imported here."""

import inspect
import traceback
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from tutti.config.options import (
    AdamOptions,
    AdamWOptions,
    Cifar10Options,
    CrossEntropyOptions,
    DatasetOptions,
    DigitsOptions,
    ImagesOptions,
    L1Options,
    LambOptions,
    LarsOptions,
    MnistOptions,
    MseOptions,
    MuonOptions,
    NbodyOptions,
    OptimizerOptions,
    PackedOptions,
    PartOptions,
    SgdOptions,
    SyntheticOptions,
    TextOptions,
    UserDatasetOptions,
    UserOptimizerOptions,
    UserPartOptions,
)
from tutti.config.schema import Count, Fraction, Switch
from tutti.errors import Cause, ConfigError, TuttiError, cause_of, nearest

# The models, their options, and where each is implemented.


class MlpOptions(PartOptions):
    """Fully connected layers with optional dropout and batch norm."""

    target = "tutti.models.small:Mlp"
    keras_target = "tutti.frameworks.models:mlp"
    name: Literal["mlp"] = "mlp"
    hidden: tuple[Count, ...] = (128, 64)
    dropout: Fraction = 0.0
    batch_norm: Switch = False


class SmallCnnOptions(PartOptions):
    """Three 3x3 convolutions with batch norm and dropout, for images of any size."""

    target = "tutti.models.small:SmallCnn"
    keras_target = "tutti.frameworks.models:small_cnn"
    name: Literal["small_cnn"] = "small_cnn"
    width: Count = 32
    dropout: Fraction = 0.2
    batch_norm: Switch = True


class MnistTorchOptions(PartOptions):
    """The PyTorch tutorial's MNIST network: two 5x5 convolutions, 2-D dropout, two dense layers."""

    target = "tutti.models.small:MnistTorch"
    keras_target = "tutti.frameworks.models:mnist_torch"
    name: Literal["mnist_torch"] = "mnist_torch"


class MnistKerasOptions(PartOptions):
    """The Keras tutorial's MNIST network: two 3x3 convolutions, dropout, dense 128."""

    target = "tutti.models.small:MnistKeras"
    keras_target = "tutti.frameworks.models:mnist_keras"
    name: Literal["mnist_keras"] = "mnist_keras"


class CnnOptions(PartOptions):
    """Three 3x3 convolutions with max-pools, dense 128: the Keras tutorial's network for CIFAR-10."""

    target = "tutti.models.cifar:Cnn"
    keras_target = "tutti.frameworks.models:cnn"
    name: Literal["cnn"] = "cnn"
    width: Count = 16
    dropout: Fraction = 0.1


class AlexnetSmallOptions(PartOptions):
    """AlexNet's five convolutions and three dense layers, for small images."""

    target = "tutti.models.cifar:AlexnetSmall"
    keras_target = "tutti.frameworks.models:alexnet_small"
    name: Literal["alexnet_small"] = "alexnet_small"
    dropout: Fraction = 0.5
    dense: Count = 4096


class CifarFastOptions(PartOptions):
    """A small network that learns CIFAR-10 in seconds on a GPU: whitened patches, six convolutions."""

    target = "tutti.models.cifar_fast:CifarFast"
    name: Literal["cifar_fast"] = "cifar_fast"
    widths: tuple[Count, Count, Count] = (64, 256, 256)
    views: Literal[1, 2, 6] = 6  # of each image in validation: unchanged, mirrored, and shifted by a pixel


class ResNetSmallOptions(PartOptions):
    """The tutorial's 26-layer residual network for small images."""

    target = "tutti.models.resnet:ResNetSmall"
    keras_target = "tutti.frameworks.models:resnet_small"
    name: Literal["resnet_small"] = "resnet_small"


class ResnetOptions(PartOptions):
    """A residual network."""

    stem: Literal["imagenet", "small"] = "imagenet"  # 7x7 with stride 2 and a pool, or 3x3 for small images
    zero_init_last: Switch = True  # residual blocks start as identities


class Resnet18Options(ResnetOptions):
    """ResNet-18, for large images or (stem: small) small ones."""

    target = "tutti.models.resnet:resnet18"
    keras_target = "tutti.frameworks.models:resnet18"
    name: Literal["resnet18"] = "resnet18"


class Resnet34Options(ResnetOptions):
    """ResNet-34, for large images or (stem: small) small ones."""

    target = "tutti.models.resnet:resnet34"
    keras_target = "tutti.frameworks.models:resnet34"
    name: Literal["resnet34"] = "resnet34"


class Resnet50Options(ResnetOptions):
    """ResNet-50, for large images or (stem: small) small ones."""

    target = "tutti.models.resnet:resnet50"
    keras_target = "tutti.frameworks.models:resnet50"
    name: Literal["resnet50"] = "resnet50"


class UNet3dOptions(PartOptions):
    """The 3-D U-Net from N-body to hydro fields, 117.0 M parameters at its full width."""

    target = "tutti.models.unet3d:UNet3d"
    name: Literal["unet3d"] = "unet3d"
    in_channels: Count = 4
    out_channels: Count = 5
    width: Count = 64
    depth: Annotated[int, Field(strict=True, ge=2)] = 6


class GptOptions(PartOptions):
    """A GPT: a transformer that predicts the next token at every place; 124 M parameters at GPT-2's size."""

    target = "tutti.models.transformer:gpt"
    name: Literal["gpt"] = "gpt"
    vocabulary: Count | None = None  # null: that of the data
    context: Count | None = None  # the longest sequence; null: that of the data
    width: Count = 128
    depth: Count = 4
    heads: Count = 4
    dropout: Fraction = 0.0


class VitOptions(PartOptions):
    """A vision transformer on the patches of images or volumes."""

    target = "tutti.models.transformer:ViT"
    name: Literal["vit"] = "vit"
    patch: Count = 4  # its side, in pixels
    width: Count = 192
    depth: Count = 6
    heads: Count = 3
    dropout: Fraction = 0.0


# What recipes call them.


class OneOf:
    """The schema of a section in which `name` chooses one of several parts; the last is for a user's own objects."""

    def __init__(self, *kinds: type[PartOptions]) -> None:
        self.built_in, self.user = kinds[:-1], kinds[-1]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = [Annotated[part, Tag(_name_in(part))] for part in self.built_in]
        members.append(Annotated[self.user, Tag("user")])
        return handler.generate_schema(Annotated[Union[*members], Discriminator(_tag)])


def _name_in(part: type[PartOptions]) -> str:
    """The name by which recipes choose a built-in part."""
    return part.model_fields["name"].default


def _tag(given: Any) -> str | None:
    name = given.get("name") if isinstance(given, dict) else getattr(given, "name", None)
    return "user" if isinstance(name, str) and ":" in name else name


MODELS = OneOf(
    MlpOptions,
    SmallCnnOptions,
    MnistTorchOptions,
    MnistKerasOptions,
    CnnOptions,
    AlexnetSmallOptions,
    CifarFastOptions,
    ResNetSmallOptions,
    Resnet18Options,
    Resnet34Options,
    Resnet50Options,
    UNet3dOptions,
    GptOptions,
    VitOptions,
    UserPartOptions,
)
DATASETS = OneOf(
    DigitsOptions,
    SyntheticOptions,
    MnistOptions,
    Cifar10Options,
    ImagesOptions,
    PackedOptions,
    NbodyOptions,
    TextOptions,
    UserDatasetOptions,
)
OPTIMIZERS = OneOf(SgdOptions, AdamOptions, AdamWOptions, LarsOptions, LambOptions, MuonOptions, UserOptimizerOptions)
LOSSES = OneOf(CrossEntropyOptions, MseOptions, L1Options, UserPartOptions)
ModelPart = Annotated[PartOptions, MODELS]
DatasetPart = Annotated[DatasetOptions, DATASETS]
OptimizerPart = Annotated[OptimizerOptions, OPTIMIZERS]
LossPart = Annotated[PartOptions, LOSSES]

SECTIONS = {"data": DATASETS, "model": MODELS, "optim": OPTIMIZERS, "loss": LOSSES}
# Options that name a part themselves.
WITHIN: dict[tuple[str, ...], tuple[type[PartOptions], ...]] = {
    ("optim", "others"): (SgdOptions, AdamOptions, AdamWOptions)
}
METRICS = {
    "accuracy": (
        "tutti.train.metrics:accuracy",
        "Share of samples, or of their places, whose highest score is the right class.",
    ),
    "top5": ("tutti.train.metrics:top5", "Share of samples whose right class is among the five highest scores."),
}
DECAYS = {
    "constant": "The scaled rate to the end.",
    "cosine": "Half a cosine from the scaled rate to end_lr at the last step.",
    "linear": "A straight line from the scaled rate to end_lr at the last step.",
    "step": "Multiplied by factor at each of the epochs in milestones.",
}


def parts_of(*place: str) -> tuple[type[PartOptions], ...]:
    """The built-in parts that a section of a recipe may name, or an option in it."""
    return SECTIONS[place[0]].built_in if len(place) == 1 else WITHIN[place]


def names_of(*place: str) -> list[str]:
    """The names that a section of a recipe may use, or an option in it."""
    return [_name_in(part) for part in parts_of(*place)]


def names_in(section: str, framework: str) -> list[str]:
    """The names that a section of a recipe may use in a framework."""
    named = zip(names_of(section), parts_of(section), strict=True)
    return [name for name, part in named if framework in part.frameworks()]


def call(target: Callable[..., Any], where: str, options: dict[str, Any], **offered: Any) -> Any:
    """Call a part with the recipe's options, plus those of the offered values that it has parameters for."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # some compiled callables have no signature to check against
        return _called(target, where, options)
    by_name = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {key: value for key, value in offered.items() if key in by_name} | options
    for key in options:
        if key not in by_name and not takes_any:
            raise ConfigError(f"{where}.{key}: {_name_of(target)} takes no such option.{nearest(key, by_name)}")
    for key, parameter in by_name.items():
        if parameter.default is parameter.empty and key not in given:
            raise ConfigError(f"{where}: {_name_of(target)} needs the option {key!r}. Set {where}.{key}=...")
    return _called(target, where, given)


def _called(target: Callable[..., Any], where: str, given: dict[str, Any]) -> Any:
    """What the part gives back, or the user's own error with the line that raised it."""
    try:
        return target(**given)
    except TuttiError:
        raise
    except Exception as error:
        if cause_of(error) is Cause.OUT_OF_MEMORY:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{where}: {_name_of(target)} failed with {type(error).__name__}: {error} "
            f"({last.filename}, line {last.lineno})."
        ) from error


def _name_of(target: Callable[..., Any]) -> str:
    return getattr(target, "__name__", type(target).__name__)
