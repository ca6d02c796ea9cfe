"""Operators cell by cell on parts, views that leave the cuts alone, and sums over space."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tutti.parallel.space.marks import Parts, dims_of, mark, tensors_of


def marked(result: Any, dims: tuple[int, ...]) -> Any:
    """Mark every tensor of a result."""
    if isinstance(result, Tensor):
        return mark(result, dims)
    if isinstance(result, list | tuple):
        for value in result:
            mark(value, dims)
    return result


def _fit(parts: Parts, value: Any, behind: tuple[int, ...], whole: list[int], func: Any) -> Any:
    """An argument beside a part whose cuts are `behind` from the end: a whole tensor is cut as the part is."""
    if isinstance(value, list | tuple):
        return type(value)([_fit(parts, each, behind, whole, func) for each in value])
    if not isinstance(value, Tensor):
        return value
    own = dims_of(value)
    if own is not None:
        if tuple(dim - value.ndim for dim in own) != behind:
            parts.refuse(func, "combines parts that are cut along different dimensions")
        return value
    broadcast = [value.ndim < -dim or value.shape[dim] == 1 for dim in behind]
    if all(broadcast):
        return value
    if any(broadcast):  # one index for each cut is needed to cut them together
        for index, dim in enumerate(behind):
            if not broadcast[index] and value.shape[dim] == whole[index]:
                size = value.shape[dim] // parts.degrees[index]
                value = value.narrow(dim, parts.grid.places[index] * size, size)
        return value
    if [value.shape[dim] for dim in behind] == whole:
        return parts.cut(value, tuple(dim + value.ndim for dim in behind))
    return parts.refuse(func, f"combines a part with a tensor of shape {tuple(value.shape)}")


def cell_by_cell(parts: Parts, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An operator that computes each cell from the same cell of its arguments."""
    given = tensors_of((*args, *kwargs.values()))
    first = next(each for each in given if dims_of(each) is not None)
    dims = dims_of(first)
    assert dims is not None
    if dims_of(args[0]) is None and func in WRITES:
        parts.refuse(func, "writes a part into a whole tensor")
    behind = tuple(dim - first.ndim for dim in dims)
    whole = [parts.shape(first)[dim] for dim in dims]
    if len(given) > 1:
        args = tuple(_fit(parts, each, behind, whole, func) for each in args)
        kwargs = {key: _fit(parts, each, behind, whole, func) for key, each in kwargs.items()}
    most = max(each.ndim for each in given)
    return marked(func(*args, **kwargs), tuple(dim + most for dim in behind))


def write(parts: Parts, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of torch that writes into its first argument; what a compiler makes of it bears no mark."""
    parts.note_unseen(f"torch.{func.__name__}")
    return cell_by_cell(parts, func, *args, **kwargs)


def convert(parts: Parts, func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Another type or device, which may be given by another tensor."""
    return mark(func(input, *args, **kwargs), dims_of(input))


def join(parts: Parts, func: Callable[..., Any], tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """`cat` and `stack` along a dimension that is not cut."""
    dim = kwargs.pop("axis", dim)
    first = next(each for each in tensors if dims_of(each) is not None)
    dims = dims_of(first)
    assert dims is not None
    stacks, ndim = func is torch.stack, first.ndim
    dim += (ndim + stacks) if dim < 0 else 0
    if not stacks and dim in dims:
        parts.refuse(func, "is along a dimension that is cut")
    behind, whole = tuple(each - ndim for each in dims), [parts.shape(first)[each] for each in dims]
    fitted = [_fit(parts, each, behind, whole, func) for each in tensors]
    return mark(func(fitted, dim), tuple(each + (stacks and each >= dim) for each in dims))


def along(parts: Parts, func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """An operator along one dimension, its first argument, which must not be cut; the others stay where they are."""
    dims = dims_of(input)
    assert dims is not None
    dim = kwargs["dim"] if "dim" in kwargs else args[0] if args else -1
    _check_uncut(parts, func, input, dim)
    return marked(func(input, *args, **kwargs), dims)


def _check_uncut(parts: Parts, func: Callable[..., Any], input: Tensor, dim: int | None) -> int:
    """The number of a dimension, counted from the first; refused if it is cut."""
    number = None if dim is None else dim % input.ndim
    if number is None or number in (dims_of(input) or ()):
        parts.refuse(func, f"is along dimension {dim}, which is cut")
    return number


def drop(parts: Parts, func: Callable[..., Any], input: Tensor, dim: int = 0, *args: Any) -> Any:
    """`select` and `unbind`, after which a dimension that is not cut is gone."""
    gone = _check_uncut(parts, func, input, dim)
    return marked(func(input, dim, *args), tuple(each - (each > gone) for each in dims_of(input) or ()))


def choose(
    parts: Parts, func: Callable[..., Any], input: Tensor, dim: int | None = None, keepdim: bool = False
) -> Tensor:
    """`argmax` and `argmin` along a dimension that is not cut."""
    gone = _check_uncut(parts, func, input, dim)
    dims = dims_of(input) or ()
    return mark(func(input, dim, keepdim), dims if keepdim else tuple(each - (each > gone) for each in dims))


def normalize(
    parts: Parts, func: Callable[..., Any], input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12
) -> Tensor:
    """Vectors of length one along a dimension that is not cut."""
    _check_uncut(parts, func, input, dim)
    return mark(func(input, p, dim, eps), dims_of(input))


def split(parts: Parts, func: Callable[..., Any], tensor: Tensor, size: Any, dim: int = 0) -> Any:
    """`split` and `chunk` along a dimension that is not cut."""
    _check_uncut(parts, func, tensor, dim)
    return marked(func(tensor, size, dim), dims_of(tensor) or ())


def linear(parts: Parts, func: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A dense layer over channels that are the last dimension."""
    dims = dims_of(input)
    if dims is None or input.ndim - 1 in dims:
        parts.refuse(func)
    return mark(func(input, weight, bias), dims)


def permute(parts: Parts, func: Callable[..., Tensor], input: Tensor, *order: Any, **kwargs: Any) -> Tensor:
    """Dimensions in another order."""
    given = kwargs.get("dims") or (order[0] if len(order) == 1 and not isinstance(order[0], int) else order)
    places = [dim % input.ndim for dim in given]
    return mark(func(input, *order, **kwargs), tuple(places.index(dim) for dim in dims_of(input) or ()))


def transpose(parts: Parts, func: Callable[..., Tensor], input: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two dimensions exchanged."""
    first, second = dim0 % input.ndim, dim1 % input.ndim
    swapped = {first: second, second: first}
    return mark(func(input, dim0, dim1), tuple(swapped.get(dim, dim) for dim in dims_of(input) or ()))


def unsqueeze(parts: Parts, func: Callable[..., Tensor], input: Tensor, dim: int) -> Tensor:
    """A new dimension of one element."""
    new = dim + input.ndim + 1 if dim < 0 else dim
    return mark(func(input, dim), tuple(each + (each >= new) for each in dims_of(input) or ()))


def squeeze(parts: Parts, func: Callable[..., Tensor], input: Tensor, dim: int | None = None) -> Tensor:
    """Without a dimension of one element."""
    dims = dims_of(input)
    assert dims is not None
    gone = [dim % input.ndim] if dim is not None else [each for each in range(input.ndim) if input.shape[each] == 1]
    gone = [each for each in gone if each not in dims and input.shape[each] == 1]
    out = input
    for each in reversed(gone):
        out = out.squeeze(each)
    return mark(out.view_as(out), tuple(each - sum(other < each for other in gone) for each in dims))


def index(parts: Parts, func: Callable[..., Tensor], input: Tensor, key: Any) -> Tensor:
    """Indexing by numbers, slices and None along dimensions that are not cut."""
    dims = dims_of(input)
    assert dims is not None
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(each, Tensor | list) for each in keys):
        parts.refuse("indexing", "with a tensor or a list needs the whole sample")
    taken = sum(each is not None and each is not Ellipsis for each in keys)
    filled: list[Any] = []
    for each in keys:
        filled += [slice(None)] * (input.ndim - taken) if each is Ellipsis else [each]
    filled += [slice(None)] * (input.ndim - sum(each is not None for each in filled))
    dim, place, places = 0, 0, {}
    for each in filled:
        if each is None:
            place += 1
            continue
        if dim in dims and each != slice(None):
            parts.refuse("indexing", f"along dimension {dim}, which is cut, needs the whole sample")
        places[dim] = place
        dim, place = dim + 1, place + (not isinstance(each, int))
    return mark(func(input, key), tuple(places[each] for each in dims))


def reshape(parts: Parts, func: Callable[..., Tensor], input: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
    """A view that leaves every cut dimension as it is; sizes are those of the whole."""
    dims = dims_of(input)
    assert dims is not None
    given = kwargs.get("shape") or kwargs.get("size") or (sizes[0] if len(sizes) == 1 else sizes)
    if isinstance(given, torch.dtype):
        return mark(func(input, given), dims)
    wanted, before = [given] if isinstance(given, int) else list(given), parts.shape(input)
    if -1 in wanted:
        wanted[wanted.index(-1)] = math.prod(before) // max(1, -math.prod(wanted))
    found = match_dims(before, wanted, dims)
    if found is None:
        return parts.refuse(func, f"to {wanted} mixes cells")
    for place, dim in zip(found, dims, strict=True):
        wanted[place] = input.shape[dim]
    return mark(func(input, wanted), found)


def match_dims(before: list[int], after: list[int], dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Where the given dimensions of a shape are in another shape of as many elements; None if they are mixed."""
    found: dict[int, int] = {}
    i = j = 0
    while i < len(before) and j < len(after):
        left, right, from_i, from_j = before[i], after[j], i, j
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(before):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            else:
                return None
        if i - from_i == 1 and j - from_j == 1:
            found[from_i] = from_j
    return tuple(found[dim] for dim in dims) if all(dim in found for dim in dims) else None


def flatten(parts: Parts, func: Callable[..., Tensor], input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Several dimensions as one, none of them cut."""
    dims, start, end = dims_of(input), start_dim % input.ndim, end_dim % input.ndim
    assert dims is not None
    if any(start <= dim <= end for dim in dims) and start != end:
        parts.refuse(func)
    return mark(func(input, start_dim, end_dim), tuple(dim - (end - start) * (dim > end) for dim in dims))


def expand(parts: Parts, func: Callable[..., Tensor], input: Tensor, *sizes: Any) -> Tensor:
    """A part repeated along other dimensions; sizes are those of the whole."""
    dims = dims_of(input)
    assert dims is not None
    wanted = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    new = tuple(dim + len(wanted) - input.ndim for dim in dims)
    for place, dim in zip(new, dims, strict=True):
        wanted[place] = input.shape[dim]
    return mark(func(input, wanted), new)


def reduce(
    parts: Parts, func: Callable[..., Tensor], input: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Tensor:
    """A sum, mean, maximum or minimum: over all cut dimensions or over none."""
    dims = dims_of(input)
    assert dims is not None
    dim = kwargs.pop("axis", dim)
    given = range(input.ndim) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    over = sorted(each % input.ndim for each in given)
    inside = [each for each in dims if each in over]
    if not inside:
        left = dims if keepdim else tuple(each - sum(other < each for other in over) for each in dims)
        return mark(func(input, over, keepdim, **kwargs), left)
    if len(inside) < len(dims):
        parts.refuse(func, "is over some of the dimensions that are cut, and not over all")
    if func in _EXTREMES:
        return _extreme(parts, func, input, over, keepdim)
    total = parts.sum(func(input, over, keepdim, **kwargs))
    return total / parts.grid.size if func in _MEANS else total


def _extreme(parts: Parts, func: Callable[..., Tensor], input: Tensor, over: list[int], keepdim: bool) -> Tensor:
    """The largest or smallest value of the whole; equal ones share its gradient, as in torch."""
    dims = dims_of(input)
    assert dims is not None
    with torch.no_grad():
        local = func(input, over, True)
        best = func(parts.gather(mark(local, dims)), list(dims), True)
        equal = (input == best).to(input.dtype)
        count = parts.sum(equal.sum(over, True))
    return parts.sum((input * equal / count).sum(over, keepdim))


def shape(parts: Parts, func: Callable[..., Any], input: Tensor, *_: Any) -> torch.Size:
    """The shape of the whole."""
    parts.note_unseen(".shape")
    return torch.Size(parts.shape(input))


def size(parts: Parts, func: Callable[..., Any], input: Tensor, dim: int | None = None) -> Any:
    """The size of the whole."""
    sizes = torch.Size(parts.shape(input))
    return sizes if dim is None else sizes[dim]


def as_it_is(parts: Parts, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A question whose answer is the same for a part."""
    return func(*args, **kwargs)


def _named(names: str, *owners: Any) -> Iterable[Any]:
    """The functions and methods of torch with these names."""
    return [getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)]


_CELLS = """
abs absolute acos acosh add addcdiv addcmul alpha_dropout asin asinh atan atan2 atanh bitwise_not bfloat16 bool
ceil celu clamp clamp_max clamp_min clip clone contiguous copysign cos cosh detach div divide double dropout dropout1d
dropout2d dropout3d elu empty_like eq erf erfc exp exp2 expm1 feature_alpha_dropout fill float float_power floor
floor_divide fmod frac full_like ge gelu gt half hardshrink hardsigmoid hardswish hardtanh int isfinite isinf isnan le
leaky_relu lerp lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit logsigmoid
long lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative ones_like positive pow prelu reciprocal
relu relu6 remainder round rrelu rsqrt rsub selu sgn sigmoid sign silu sin sinh softplus softshrink softsign sqrt square
sub subtract tan tanh tanhshrink threshold true_divide trunc type where xlogy zero_ zeros_like
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __rdiv__
__itruediv__ __div__ __idiv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __ipow__ __neg__ __pos__
__abs__ __invert__ __and__ __rand__ __or__ __ror__ __xor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ view_as cpu cuda
requires_grad_ pin_memory clone masked_fill_ copy_ detach_
"""
_IN_PLACE = " ".join(f"{name}_" for name in _CELLS.split() if not name.endswith("_"))
WRITES = frozenset(_named(_IN_PLACE + " zero_ masked_fill_ copy_", torch, Tensor, F))
_MEANS = (torch.mean, Tensor.mean)
_EXTREMES = (torch.amax, torch.amin, Tensor.amax, Tensor.amin)
_QUESTIONS = """
dim ndimension is_contiguous is_floating_point is_complex is_signed element_size get_device register_hook retain_grad
is_pinned is_inference __hash__ __repr__ __str__ __format__ storage_offset is_same_size _is_view backward
register_post_accumulate_grad_hook data_ptr untyped_storage new_zeros new_ones new_full new_empty new_tensor
"""
_PROPERTIES = """
ndim device dtype is_cuda is_cpu is_meta is_leaf requires_grad grad_fn layout is_sparse is_quantized is_mkldnn is_mps
is_xpu is_nested grad _version itemsize names output_nr is_sparse_csr is_vulkan is_ipu is_maia is_mtia _base
_backward_hooks
"""

OPERATORS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_named(_CELLS + _IN_PLACE, torch, Tensor, F), cell_by_cell),
    **dict.fromkeys(_named(_IN_PLACE, torch), write),
    **dict.fromkeys(_named(_QUESTIONS, torch, Tensor), as_it_is),
    **{getattr(Tensor, name).__get__: as_it_is for name in _PROPERTIES.split() if hasattr(Tensor, name)},
    **{getattr(Tensor, name).__set__: as_it_is for name in ("requires_grad", "grad")},
    Tensor.shape.__get__: shape,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.size: size,
    Tensor.__len__: as_it_is,
    **dict.fromkeys(_named("cat concat concatenate stack", torch), join),
    **dict.fromkeys(_named("softmax log_softmax softmin glu narrow cumsum", torch, Tensor, F), along),
    **dict.fromkeys(_named("unbind select", torch, Tensor), drop),
    **dict.fromkeys(_named("argmax argmin", torch, Tensor), choose),
    F.normalize: normalize,
    **dict.fromkeys(_named("split chunk tensor_split", torch, Tensor), split),
    **dict.fromkeys(_named("to type_as", Tensor), convert),
    F.linear: linear,
    **dict.fromkeys(_named("permute", torch, Tensor), permute),
    **dict.fromkeys(_named("transpose swapaxes swapdims", torch, Tensor), transpose),
    **dict.fromkeys(_named("unsqueeze", torch, Tensor), unsqueeze),
    **dict.fromkeys(_named("squeeze", torch, Tensor), squeeze),
    **dict.fromkeys(_named("view reshape", torch, Tensor), reshape),
    **dict.fromkeys(_named("flatten", torch, Tensor), flatten),
    **dict.fromkeys(_named("expand", Tensor), expand),
    **dict.fromkeys(_named("sum mean amax amin", torch, Tensor), reduce),
    Tensor.__getitem__: index,
}
