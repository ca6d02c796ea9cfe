"""The named parts a recipe may choose, each with its options and where it lives; none is imported here."""

import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args

from pydantic import Discriminator, Tag

from tutti.config.options import (
    AdamOptions,
    AdamWOptions,
    AlexnetSmallOptions,
    Cifar10Options,
    CifarFastOptions,
    CnnOptions,
    CrossEntropyOptions,
    DigitsOptions,
    ImagesOptions,
    L1Options,
    LambOptions,
    LarsOptions,
    MlpOptions,
    MnistKerasOptions,
    MnistOptions,
    MnistTorchOptions,
    MseOptions,
    NbodyOptions,
    PartOptions,
    Resnet18Options,
    Resnet34Options,
    Resnet50Options,
    ResNetSmallOptions,
    SgdOptions,
    SmallCnnOptions,
    SyntheticOptions,
    UNet3dOptions,
    UserDatasetOptions,
    UserOptimizerOptions,
    UserPartOptions,
)
from tutti.errors import ConfigError, TuttiError, nearest


def _tag(given: Any) -> str | None:
    name = given.get("name") if isinstance(given, dict) else getattr(given, "name", None)
    return "user" if isinstance(name, str) and ":" in name else name


ModelPart = Annotated[
    Annotated[MlpOptions, Tag("mlp")]
    | Annotated[SmallCnnOptions, Tag("small_cnn")]
    | Annotated[MnistTorchOptions, Tag("mnist_torch")]
    | Annotated[MnistKerasOptions, Tag("mnist_keras")]
    | Annotated[CnnOptions, Tag("cnn")]
    | Annotated[AlexnetSmallOptions, Tag("alexnet_small")]
    | Annotated[CifarFastOptions, Tag("cifar_fast")]
    | Annotated[ResNetSmallOptions, Tag("resnet_small")]
    | Annotated[Resnet18Options, Tag("resnet18")]
    | Annotated[Resnet34Options, Tag("resnet34")]
    | Annotated[Resnet50Options, Tag("resnet50")]
    | Annotated[UNet3dOptions, Tag("unet3d")]
    | Annotated[UserPartOptions, Tag("user")],
    Discriminator(_tag),
]
DatasetPart = Annotated[
    Annotated[DigitsOptions, Tag("digits")]
    | Annotated[SyntheticOptions, Tag("synthetic")]
    | Annotated[MnistOptions, Tag("mnist")]
    | Annotated[Cifar10Options, Tag("cifar10")]
    | Annotated[ImagesOptions, Tag("images")]
    | Annotated[NbodyOptions, Tag("nbody")]
    | Annotated[UserDatasetOptions, Tag("user")],
    Discriminator(_tag),
]
OptimizerPart = Annotated[
    Annotated[SgdOptions, Tag("sgd")]
    | Annotated[AdamOptions, Tag("adam")]
    | Annotated[AdamWOptions, Tag("adamw")]
    | Annotated[LarsOptions, Tag("lars")]
    | Annotated[LambOptions, Tag("lamb")]
    | Annotated[UserOptimizerOptions, Tag("user")],
    Discriminator(_tag),
]
LossPart = Annotated[
    Annotated[CrossEntropyOptions, Tag("cross_entropy")]
    | Annotated[MseOptions, Tag("mse")]
    | Annotated[L1Options, Tag("l1")]
    | Annotated[UserPartOptions, Tag("user")],
    Discriminator(_tag),
]

SECTIONS: dict[str, Any] = {"data": DatasetPart, "model": ModelPart, "optim": OptimizerPart, "loss": LossPart}
METRICS = {
    "accuracy": ("tutti.train.metrics:accuracy", "Share of samples whose highest score is the right class."),
    "top5": ("tutti.train.metrics:top5", "Share of samples whose right class is among the five highest scores."),
}
DECAYS = {
    "constant": "The scaled rate to the end.",
    "cosine": "Half a cosine from the scaled rate to end_lr at the last step.",
    "linear": "A straight line from the scaled rate to end_lr at the last step.",
    "step": "Multiplied by factor at each of the epochs in milestones.",
}


def parts_of(section: str) -> Iterator[type[PartOptions]]:
    """The built-in parts that a section of a recipe may name."""
    for member in get_args(get_args(SECTIONS[section])[0]):
        part = get_args(member)[0]
        if part.target:
            yield part


def names_of(section: str) -> list[str]:
    """The names that a section of a recipe may use."""
    return [get_args(part.model_fields["name"].annotation)[0] for part in parts_of(section)]


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
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{where}: {_name_of(target)} failed with {type(error).__name__}: {error} "
            f"({last.filename}, line {last.lineno})."
        ) from error


def _name_of(target: Callable[..., Any]) -> str:
    return getattr(target, "__name__", type(target).__name__)
