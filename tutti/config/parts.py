"""The parts that a recipe chooses by name, section by section; none of them is imported here."""

import inspect
import traceback
from collections.abc import Callable
from typing import Annotated, Any, Union

from pydantic import Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from tutti.config.options import (
    AdamOptions,
    AdamWOptions,
    AlexnetSmallOptions,
    Cifar10Options,
    CifarFastOptions,
    CnnOptions,
    CrossEntropyOptions,
    DatasetOptions,
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
    OptimizerOptions,
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
from tutti.errors import Cause, ConfigError, TuttiError, cause_of, nearest


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
    UserPartOptions,
)
DATASETS = OneOf(
    DigitsOptions, SyntheticOptions, MnistOptions, Cifar10Options, ImagesOptions, NbodyOptions, UserDatasetOptions
)
OPTIMIZERS = OneOf(SgdOptions, AdamOptions, AdamWOptions, LarsOptions, LambOptions, UserOptimizerOptions)
LOSSES = OneOf(CrossEntropyOptions, MseOptions, L1Options, UserPartOptions)
ModelPart = Annotated[PartOptions, MODELS]
DatasetPart = Annotated[DatasetOptions, DATASETS]
OptimizerPart = Annotated[OptimizerOptions, OPTIMIZERS]
LossPart = Annotated[PartOptions, LOSSES]

SECTIONS = {"data": DATASETS, "model": MODELS, "optim": OPTIMIZERS, "loss": LOSSES}
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


def parts_of(section: str) -> tuple[type[PartOptions], ...]:
    """The built-in parts that a section of a recipe may name."""
    return SECTIONS[section].built_in


def names_of(section: str) -> list[str]:
    """The names that a section of a recipe may use."""
    return [_name_in(part) for part in parts_of(section)]


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
