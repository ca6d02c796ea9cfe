"""How gradients are reduced in every framework: compression, groups, and variables that are local to a rank."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from tutti.horovod.basics import ProcessSet, global_process_set
from tutti.horovod.engine.messages import AVERAGE
from tutti.horovod.errors import warn_deprecated


class Compressor:
    """The interface of a compressor: two static methods; the context that the first returns goes to the second."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and what is needed to restore it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor with its original type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors in half precision, others unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        if isinstance(tensor, torch.Tensor):
            return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype
        import tensorflow as tf

        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            return tensor.to(ctx)
        import tensorflow as tf

        return tf.cast(tensor, ctx)


class Compression:
    """The compressors of Horovod."""

    none = NoneCompressor
    fp16 = FP16Compressor


def identity(variable: Any) -> int:
    """Return an identity for a variable; a variable of Keras 3 and TensorFlow's inside it have the same."""
    inner = getattr(variable, "_value", None) if type(variable).__module__.startswith("keras.") else None
    return id(variable if inner is None or not hasattr(inner, "assign") else inner)


def variables_of(holder: Any) -> list[Any]:
    """Return the variables of a model or an optimizer, for which they are an attribute or a method."""
    found: Any = getattr(holder, "variables", ())
    if callable(found):
        found = found()
    return list(found)


def trained_in(layers: Any) -> list[Any]:
    """Return the trainable weights of one layer, several, or none."""
    listed = [] if layers is None else layers if isinstance(layers, list | tuple) else [layers]
    for layer in listed:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers has {type(layer)}: expected layers of Keras.")
    return [variable for layer in listed for variable in layer.trainable_weights]


def check_groups(groups: Any) -> None:
    """Raise ValueError for groups that are not valid; all gradients of a step are sent together in any case."""
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return
    if not (isinstance(groups, list) and all(isinstance(group, list | tuple) for group in groups)):
        raise ValueError(f"groups={groups!r}: expected a number of groups, or a list of lists of variables.")
    members = [identity(variable) for group in groups for variable in group]
    if len(set(members)) < len(members):
        raise ValueError("groups has a variable twice: expected each in one group at most.")


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """How an optimizer or a gradient tape reduces gradients: the arguments of Horovod's functions."""

    compression: Any = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: int = AVERAGE
    num_groups: int = 0  # deprecated, as `groups`
    groups: Any = None  # accepted without effect: all gradients of a step are sent together
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        if self.gradient_predivide_factor != 1.0 and self.op != AVERAGE:
            raise ValueError(
                f"gradient_predivide_factor={self.gradient_predivide_factor} not supported with op != Average. "
                "Leave it out, or use op=hvd.Average."
            )
        if self.num_groups != 0:
            warn_deprecated("Parameter `num_groups` has been replaced by `groups` and will be removed")
        check_groups(self.groups if self.groups is not None else self.num_groups or None)

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options among the arguments of a function, which gives its `locals()`."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls) if field.name in arguments})
