"""Which tensors are parts of a whole: a mark on the tensor names the dimensions along which it is cut."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction

from tutti.errors import ConfigError
from tutti.parallel.space import halo
from tutti.parallel.space.halo import SpaceGrid

Padding = tuple[tuple[tuple[int, int], ...], float, bool]  # cells below and above for each cut, their value, periodic
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


def dims_of(tensor: Any) -> tuple[int, ...] | None:
    """The dimensions along which a tensor is cut; None for one that is whole."""
    return getattr(tensor, "tutti_cut", None)


def padding_of(tensor: torch.Tensor) -> Padding | None:
    """The padding that a part still has to get, which the next layer exchanges as its halo."""
    return getattr(tensor, "tutti_padding", None)


def mark(tensor: torch.Tensor, dims: tuple[int, ...] | None) -> torch.Tensor:
    """Mark a tensor as cut along the given dimensions; None for a whole one."""
    if dims is not None or dims_of(tensor) is not None:
        tensor.tutti_cut = dims  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


class Parts:
    """What the operators of a model need to compute on parts: marks, halos, sums over parts, whole tensors."""

    def __init__(self, grid: SpaceGrid) -> None:
        self.grid = grid
        self.degrees = grid.degrees
        self.number = halo.register(grid)
        self.is_recording = True  # until the model has been checked
        self.levels: set[tuple[int, ...]] = set()  # sizes in space, of the whole, of tensors that are cut
        self.gathered: list[tuple[tuple[int, ...], str]] = []  # sizes in space of parts that were gathered, and where
        self.unseen: list[str] = []  # what the model does with parts that a compiler does not show to the mode
        self.model: nn.Module | None = None
        self._nodes: dict[int, Any] = {}  # what computed the parts

    def connect(self, grid: SpaceGrid) -> None:
        """Set the grid with its process group."""
        self.grid, self.number = grid, halo.register(grid)

    def remember(self, result: Any) -> None:
        """Remember what computed a part, until the model has been checked."""
        for each in tensors_of((result,)):
            if self.is_recording and dims_of(each) is not None and each.grad_fn is not None:
                self._nodes[id(each.grad_fn)] = each.grad_fn

    def check_functions(self, given: list[torch.Tensor]) -> None:
        """Refuse an autograd.Function on parts, whose backward pass the mode does not see."""
        for each in given:
            node = each.grad_fn
            if not isinstance(node, BackwardCFunction) or _is_ours(node):
                continue
            if any(id(source) in self._nodes for source, _ in node.next_functions):
                name = type(node).__name__.removesuffix("Backward")
                self.refuse(f"the autograd.Function {name}", "has a gradient of its own, which is of a part alone")

    def end_recording(self, sizes: tuple[int, ...]) -> None:
        """End the check of a model on samples of these sizes; refuse one that computes on whole samples alone."""
        self.is_recording = False
        self._nodes.clear()
        for level, why in self.gathered:
            if level == sizes:
                raise ConfigError(
                    f"parallel.space={show_parts(self.grid.parts)} on samples of {' x '.join(map(str, sizes))} cells: "
                    f"{why} would compute the whole sample on every rank, since its parts are too small or its output "
                    "does not split evenly. Choose larger samples or fewer parts, or set parallel.space=1."
                )

    def shape(self, tensor: torch.Tensor) -> list[int]:
        """The shape of the whole of which a tensor is a part."""
        shape, dims = list(tensor.shape), dims_of(tensor)
        if dims is not None:
            padding = padding_of(tensor)
            for index, dim in enumerate(dims):
                shape[dim] *= self.degrees[index]
                if padding is not None:
                    shape[dim] += padding[0][index][0] + padding[0][index][1]
        return shape

    def note(self, tensor: torch.Tensor, spatial: int) -> torch.Tensor:
        """Remember the size of a level of a model that is computed in parts; it has `spatial` dimensions in space."""
        if self.is_recording and dims_of(tensor) is not None:
            self.levels.add(tuple(self.shape(tensor)[-spatial:]))
        return tensor

    def note_unseen(self, what: str) -> None:
        """Remember what a compiler would compute on a part as if it were whole."""
        if self.is_recording:
            self.unseen.append(f"{what} in {self.find_place()}")

    def widen(
        self, part: torch.Tensor, index: int, low: int, high: int, fill: float = 0.0, periodic: bool = False
    ) -> torch.Tensor:
        """A part with cells of its neighbours along one of its cuts."""
        if not low and not high:
            return part
        dims = dims_of(part)
        assert dims is not None
        axis = self.grid.axes[index]
        return mark(halo.halo(part, dims[index], axis, low, high, fill, periodic, self.number), dims)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the parts of a sample."""
        return halo.sum_parts(tensor, self.number)

    def gather(self, part: torch.Tensor, func: Any = None, *how: Any) -> torch.Tensor:
        """The whole of which a tensor is a part, with its padding; a whole tensor as it is.

        An operator that computes the whole, since it cannot compute on parts, is noted.
        """
        dims, padding = dims_of(part), padding_of(part)
        if dims is None:
            return part
        if self.is_recording and func is not None:
            why = " ".join([name_of(func), *map(str, how), "in", self.find_place()])
            self.gathered.append((tuple(self.shape(part)[2:]), why))
        out = halo.gather_parts(part, list(dims), self.number)
        if padding is None:
            return out
        pads = [0] * (2 * (part.ndim - min(dims)))
        for index, dim in enumerate(dims):
            begin = 2 * (part.ndim - 1 - dim)
            pads[begin], pads[begin + 1] = padding[0][index]
        return _pad(out, pads, padding[1], padding[2])

    def cut(self, tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        return mark(halo.cut(tensor, dims, self.grid), dims)

    def cut_again(self, tensor: torch.Tensor, spatial: int) -> torch.Tensor:
        """This rank's part of a whole tensor that has the size of a level which is computed in parts."""
        if tuple(tensor.shape[-spatial:]) not in self.levels:
            return tensor
        return self.cut(tensor, tuple(tensor.ndim - spatial + axis for axis in self.grid.axes))

    def refuse(self, operator: Any, reason: str = "needs the whole sample") -> NoReturn:
        """Raise a ConfigError with the operator, its module and its line."""
        raise ConfigError(
            f"{name_of(operator)} in {self.find_place()} {reason}: expected what can be computed on parts of a sample "
            f"with parallel.space={show_parts(self.grid.parts)}. Gather before it with "
            "tutti.parallel.space.whole(tensor), or set parallel.space=1."
        )

    def find_place(self) -> str:
        """The module and the line of the model that are computed, from the stack."""
        frame: FrameType | None = sys._getframe(1)
        module, line = None, ""
        while frame is not None and (module is None or not line):
            path = frame.f_code.co_filename
            owner = frame.f_locals.get("self")
            if module is None and isinstance(owner, nn.Module):
                module = owner
            if not line and not path.startswith((_TORCH, _HERE)):
                line = f"{Path(path).name}:{frame.f_lineno}"
            frame = frame.f_back
        return line if module is None else f"{self._name(module)} ({line})"

    def _name(self, module: nn.Module) -> str:
        names = self.model.named_modules() if self.model is not None else ()
        found = next((name for name, each in names if each is module), "")
        return f"{found} {type(module).__name__}".strip()


def show_parts(parts: tuple[int, ...]) -> str:
    """Parts as a recipe has them: 2, or [2,2,1]."""
    return str(parts[0]) if len(parts) == 1 else str(list(parts)).replace(" ", "")


def _is_ours(node: Any) -> bool:
    """Returns whether a function is the gradient of a dropout mask, or of an operator of halos, sums or wholes."""
    return type(node).__name__.startswith(("GeneratedBackwardFor_tutti_", "_MaskedBackward"))


def _pad(tensor: torch.Tensor, pads: list[int], value: float, periodic: bool) -> torch.Tensor:
    """F.pad along any dimensions; torch's circular padding takes those of convolutions only."""
    if not periodic:
        return F.pad(tensor, pads, "constant", value)
    for place in range(0, len(pads), 2):
        low, high = pads[place : place + 2]
        dim = tensor.ndim - 1 - place // 2
        size = tensor.shape[dim]
        pieces = [tensor.narrow(dim, size - low, low), tensor, tensor.narrow(dim, 0, high)]
        tensor = torch.cat(pieces, dim) if low or high else tensor
    return tensor


def name_of(func: Callable[..., Any] | str) -> str:
    """The name of an operator, as a user calls it."""
    if isinstance(func, str):
        return func
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") == "__get__" and owner is not None:
        return f".{owner.__name__}"
    return getattr(func, "__name__", str(func))


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among arguments, also in lists and tuples of them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found
