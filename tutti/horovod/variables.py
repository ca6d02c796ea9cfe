"""Variables of TensorFlow and Keras, whichever of the two they belong to."""

from typing import Any


def identity(variable: Any) -> int:
    """Which variable it is; the same for one of Keras 3 and for TensorFlow's in it."""
    inner = getattr(variable, "_value", None) if type(variable).__module__.startswith("keras.") else None
    return id(variable if inner is None or not hasattr(inner, "assign") else inner)


def variables_of(holder: Any) -> list[Any]:
    """The variables of a model or an optimizer, which some have as a list and some behind a call."""
    found: Any = getattr(holder, "variables", ())
    if callable(found):
        found = found()
    return list(found)


def trained_in(layers: Any) -> list[Any]:
    """The weights that are trained in one layer, in several or in none."""
    listed = [] if layers is None else layers if isinstance(layers, list | tuple) else [layers]
    for layer in listed:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers has {type(layer)}: expected layers of Keras.")
    return [variable for layer in listed for variable in layer.trainable_weights]


def check_groups(groups: Any) -> None:
    """Refuse what names no groups; all gradients of a step travel together, whatever they are."""
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return
    if not (isinstance(groups, list) and all(isinstance(group, list | tuple) for group in groups)):
        raise ValueError(f"groups={groups!r}: expected a number of groups, or a list of lists of variables.")
    members = [identity(variable) for group in groups for variable in group]
    if len(set(members)) < len(members):
        raise ValueError("groups has a variable twice: expected each in one group at most.")
