"""A model that is written for whole samples computes on parts: its calls of torch are replaced while it runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from tutti.errors import ConfigError
from tutti.parallel.dropout import Place
from tutti.parallel.space import cells, norms, windows
from tutti.parallel.space.halo import SpaceGrid
from tutti.parallel.space.marks import Parts, dims_of, mark, padding_of, show_parts, tensors_of


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of which a tensor in a model is a part on this rank; a whole tensor as it is."""
    if has_torch_function((tensor,)):
        return handle_torch_function(whole, (tensor,), tensor)
    return tensor


def _whole(parts: Parts, func: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
    parts.note_unseen("whole")
    return parts.gather(tensor)


_OPERATORS: dict[Any, Callable[..., Any]] = {
    **cells.OPERATORS,
    **windows.OPERATORS,
    **norms.OPERATORS,
    whole: _whole,
}
# These see the padding that a part has yet to get; before all others it is gathered and added.
_KNOW_PADDING = (
    windows.convolution,
    windows.transposed,
    windows.max_pool,
    windows.average_pool,
    cells.as_it_is,
    cells.shape,
    cells.size,
    _whole,
)


class SpaceMode(TorchFunctionMode):
    """Within it, the operators of torch compute on parts as they do on the whole, or are refused."""

    def __init__(self, grid: SpaceGrid) -> None:
        super().__init__()
        self.parts = Parts(grid)
        self.gives_parts = True  # whether the model's outputs are parts; a check of the model finds out

    def connect(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Set the ranks that share a sample, in the order of their parts."""
        self.parts.connect(replace(self.parts.grid, group=group, ranks=tuple(ranks)))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        parts, given = self.parts, tensors_of((*args, *kwargs.values()))
        if parts.is_recording:
            parts.check_functions(given)
        if not any(dims_of(each) is not None for each in given):
            if func in windows.GROWS:
                return _OPERATORS[func](parts, func, *args, **kwargs)
            return func(*args, **kwargs)
        result = self._on_parts(func, given, args, kwargs)
        if parts.is_recording:
            parts.remember(result)
        return result

    def _on_parts(
        self, func: Callable[..., Any], given: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        parts = self.parts
        handler = _OPERATORS.get(func)
        if handler is None:
            return parts.refuse(func)
        if handler not in _KNOW_PADDING and any(padding_of(each) is not None for each in given):
            args = tuple(_padded(parts, each) for each in args)
            with self:
                return func(*args, **kwargs)
        return handler(parts, func, *args, **kwargs)

    def split(self, inputs: Any) -> Any:
        """Mark this rank's part of a batch."""
        if isinstance(inputs, torch.Tensor):
            axes = self.parts.grid.axes
            if inputs.ndim < 3 + max(axes, default=-1):
                return inputs
            part = mark(inputs.view_as(inputs), tuple(2 + axis for axis in axes))
            self.parts.remember(part)
            return self.parts.note(part, inputs.ndim - 2)
        if isinstance(inputs, dict):
            return {key: self.split(value) for key, value in inputs.items()}
        if isinstance(inputs, list | tuple):
            return type(inputs)([self.split(value) for value in inputs])
        return inputs

    def run(self, model: Callable[..., Any], inputs: Any) -> Any:
        """What a model computes of this rank's part of a batch."""
        inputs = self.split(inputs)
        with self:
            return model(inputs)

    def locate(self, tensor: torch.Tensor) -> Place:
        """The shape of the whole of which a tensor is a part, and where the part begins along each dimension."""
        offsets = [0] * tensor.ndim
        for dim, place in zip(dims_of(tensor) or (), self.parts.grid.places, strict=False):
            offsets[dim] = place * tensor.shape[dim]
        return tuple(self.parts.shape(tensor)), tuple(offsets)

    def mark_like(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """A tensor as a part of the same whole as another."""
        return mark(tensor, dims_of(other))

    def gather(self, values: Any, cells: Sequence[int]) -> Any:
        """Outputs or targets of whole samples, from those of parts of this many cells; others as they are."""
        if isinstance(values, torch.Tensor):
            first = values.ndim - len(cells)
            if first < 1 or list(values.shape[first:]) != list(cells):
                return values
            return self.parts.gather(mark(values.view_as(values), tuple(first + axis for axis in self.parts.grid.axes)))
        if isinstance(values, dict):
            return {key: self.gather(value, cells) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return type(values)([self.gather(value, cells) for value in values])
        return values


def _padded(parts: Parts, value: Any) -> Any:
    """An argument with its padding, for which it is gathered."""
    if isinstance(value, list | tuple):
        return type(value)([_padded(parts, each) for each in value])
    if isinstance(value, torch.Tensor) and padding_of(value) is not None:
        return parts.gather(value, "padding that no convolution takes")
    return value


def check_space(
    model: nn.Module, mode: SpaceMode, input_shape: tuple[int, ...], device: torch.device, compiles: bool = False
) -> None:
    """Refuse a model that cannot compute on parts of samples of this shape, channels first.

    The model is called with tensors that have no values, on this rank alone.
    """
    parts = mode.parts
    check_sizes(parts.grid.parts, input_shape)
    parts.model = model
    named = [*model.named_parameters(), *model.named_buffers()]
    shape = list(input_shape)
    for axis, count in enumerate(parts.grid.parts):
        shape[1 + axis] //= count
    with FakeTensorMode():
        state = {name: torch.empty(each.shape, dtype=each.dtype, device=device) for name, each in named}
        dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
        inputs = torch.empty(2, *shape, dtype=dtype, device=device, requires_grad=True)
        outputs = mode.run(lambda part: functional_call(model, state, (part,)), inputs)
    parts.end_recording(tuple(input_shape[1:]))
    if compiles and parts.unseen:
        raise ConfigError(
            f"speed.compile with parallel.space={show_parts(parts.grid.parts)}: {parts.unseen[0]} is not seen where a "
            "compiler reads the model, and would be that of a part. Use tensor.size() for .shape and methods for "
            "functions that write in place, or set speed.compile=false."
        )
    found = tensors_of([outputs] if isinstance(outputs, torch.Tensor) else list(outputs))
    mode.gives_parts = any(dims_of(each) is not None for each in found)


def check_sizes(parts: tuple[int, ...], input_shape: tuple[int, ...]) -> None:
    """Refuse samples that do not split into equal parts; their shape has the channels first."""
    given, sizes = f"parallel.space={show_parts(parts)}", input_shape[1:]
    shown = " x ".join(map(str, input_shape))
    if len(sizes) < len(parts):
        raise ConfigError(
            f"{given} on samples of {shown}: expected channels and then {len(parts)} dimensions in space. "
            "Set parallel.space=1."
        )
    for size, count in zip(sizes, parts, strict=False):
        if size % count:
            divisors = ", ".join(str(each) for each in range(1, count) if size % each == 0)
            raise ConfigError(
                f"{given} on samples of {shown}: {size} cells do not split into {count} equal parts. "
                f"Set a divisor of {size}, such as {divisors}, or choose samples of another size."
            )


def check_loss(criterion: Callable[[Any, Any], torch.Tensor], parts: tuple[int, ...]) -> None:
    """Refuse a loss whose mean over parts is not that of the whole, as far as random numbers show it."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, *(4 * count for count in parts), *[4] * (3 - len(parts)))
    outputs, targets = (torch.rand(shape, generator=generator) for _ in range(2))
    pairs = [(outputs, targets)]
    for axis, count in enumerate(parts):
        pairs = [pair for each in pairs for pair in zip(*(t.chunk(count, 2 + axis) for t in each), strict=True)]
    try:
        with torch.no_grad():
            expected = float(criterion(outputs, targets))
            found = sum(float(criterion(*pair)) for pair in pairs) / len(pairs)
    except Exception:  # a loss of something else than two tensors of one shape
        return
    if not math.isclose(expected, found, rel_tol=1e-3, abs_tol=1e-6):
        raise ConfigError(
            f"parallel.space={show_parts(parts)}: the loss of a whole sample is {expected:.4g} and the mean over its "
            f"parts {found:.4g}: expected a loss that is a mean over cells. Choose another loss, or set "
            "parallel.space=1."
        )
