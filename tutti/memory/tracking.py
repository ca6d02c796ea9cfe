"""Tracks the memory of tensors that have shapes and no data: what is allocated when, of which kind, and the peak."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, BATCH = "parameters", "gradients", "optimizer state", "buffers", "batch"
ACTIVATIONS, GATHERED, TEMPORARIES, WORKSPACE = "activations", "gathered weights", "temporaries", "workspace"
AVERAGES = "averaged weights"
KINDS: tuple[str, ...] = (
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    AVERAGES,
    BUFFERS,
    BATCH,
    ACTIVATIONS,
    GATHERED,
    TEMPORARIES,
    WORKSPACE,
)
_ROUNDING = 512  # the allocator of torch for GPUs gives multiples of it
_COLLECTIVES = ("fsdp", "c10d", "_c10d_functional")  # operators whose operands are buffers of communication
_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
_IN_PLACE = ("aten::_fused_sgd_", "aten::_fused_adam", "aten::_fused_adagrad_")  # steps of optimizers
# Operators on parts of samples, and how often they allocate the size of their results besides them.
_INSIDE = {"tutti::gather_parts": 1, "tutti::standardize": 1, "tutti::standardize_backward": 3}
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclass
class Allocation:
    """The memory of one storage from its allocation to its release, in counts of events."""

    num_bytes: int
    kind: str
    born: int
    died: int | None = None  # None: it is still there


@dataclass(frozen=True)
class Peak:
    """The most memory at one time, the phase in which it is needed, and how much of it is of which kind."""

    num_bytes: int
    phase: str
    kinds: dict[str, int]


class MemoryTracker(TorchDispatchMode):
    """Notes every storage that operators allocate while it is entered; views and in-place results allocate none.

    `kind` is given to what is allocated next, `phase` is where the run is; both are set from outside. `workspace` tells
    how many bytes a convolution needs besides its operands.
    """

    def __init__(self, workspace: Callable[[list[torch.Tensor]], int] | None = None) -> None:
        super().__init__()
        self.kind = TEMPORARIES
        self.multiplies = False  # whether a matrix product was computed
        self.most_elements = 0  # of a tensor that was allocated
        self._is_paused = False
        self._workspace = workspace
        self._live: dict[int, tuple[Allocation, Any]] = {}  # by the address of the storage
        self._allocations: list[Allocation] = []
        self._phases: list[tuple[int, str]] = []
        self._time = 0
        self._earlier: Peak | None = None

    def begin(self, phase: str, kind: str) -> None:
        """Say which phase begins, and the kind of what is allocated in it."""
        self._phases.append((self._time + 1, phase))
        self.kind = kind

    def mark(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Give the storages of tensors a kind, from their allocation on."""
        for tensor in tensors:
            if tensor is not None:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self._see(local).kind = kind

    def now(self) -> dict[str, int]:
        """The bytes of every kind at this moment."""
        return _by_kind(allocation for allocation, _ in self._live.values())

    def restart(self) -> None:
        """Forget the past, but not what is there."""
        self._allocations = [allocation for allocation, _ in self._live.values()]
        self._phases = []

    def compare(self, earlier: Peak) -> None:
        """Count a peak from before the last restart too."""
        self._earlier = earlier

    def peak(self) -> Peak:
        """The peak since the last restart, or the one to compare with where that is higher."""
        found = self._find_peak()
        return self._earlier if self._earlier and self._earlier.num_bytes > found.num_bytes else found

    def _find_peak(self) -> Peak:
        made = self._allocations
        events = [(each.born, each.num_bytes) for each in made]
        events += [(each.died, -each.num_bytes) for each in made if each.died is not None]
        total, most, moment = 0, 0, 0
        start = self._phases[0][0] if self._phases else 0
        for time, change in sorted(events):
            total += change
            if total > most and time >= start:
                most, moment = total, time
        there = [
            each for each in self._allocations if each.born <= moment and (each.died is None or each.died > moment)
        ]
        phase = [name for time, name in self._phases if time <= moment]
        return Peak(most, phase[-1] if phase else "", _by_kind(there))

    def __enter__(self) -> "MemoryTracker":
        self._resize = torch.UntypedStorage.resize_
        resize, tracker = self._resize, self

        def resized(self: torch.UntypedStorage, size: int) -> Any:
            result = resize(self, size)
            tracker._resized(self)
            return result

        torch.UntypedStorage.resize_ = resized  # FSDP2 releases gathered weights by it, beside all operators
        self._find_shapes = ShardingPropagator._propagate_tensor_meta_non_cached
        find_shapes = self._find_shapes

        def unseen(self: ShardingPropagator, op_schema: Any) -> Any:
            tracker._is_paused = True
            try:
                return find_shapes(self, op_schema)
            finally:
                tracker._is_paused = False

        # It computes the shapes of results by the operator on whole tensors without data, which a rank never has.
        ShardingPropagator._propagate_tensor_meta_non_cached = unseen
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        ShardingPropagator._propagate_tensor_meta_non_cached = self._find_shapes
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again, with the local tensors
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(_IN_PLACE):
            return None  # it has no form for tensors without data, and allocates nothing
        with torch._C.DisableTorchFunction():  # modes for functions have seen the function that came to this operator
            result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._see(tensor)
        if name.partition("::")[0] in _COLLECTIVES:
            for tensor in _tensors((args, kwargs)):
                allocation = self._see(tensor)
                if allocation.kind in (ACTIVATIONS, TEMPORARIES):
                    allocation.kind = GATHERED
        elif name in _INSIDE:
            self._use(sum(each.nbytes for each in _tensors(result)) * _INSIDE[name])
        elif name in _CONVOLUTIONS and self._workspace:
            self._use(self._workspace([*_tensors(args), *_tensors(result)]))
        elif name in _PRODUCTS:
            self.multiplies = True
        return result

    def _see(self, tensor: torch.Tensor) -> Allocation:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
            self.most_elements = max(self.most_elements, tensor.numel())
            allocation = self._allocate(storage.nbytes(), self.kind)
            self._live[address] = allocation, weakref.ref(storage, lambda _: self._free(address))
        return self._live[address][0]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (found := self._live.get(storage._cdata)) is not None:
            allocation, reference = found
            self._time += 1
            allocation.died = self._time
            self._live[storage._cdata] = self._allocate(storage.nbytes(), allocation.kind), reference

    def _allocate(self, num_bytes: int, kind: str) -> Allocation:
        self._time += 1
        allocation = Allocation(-(-num_bytes // _ROUNDING) * _ROUNDING, kind, self._time)
        self._allocations.append(allocation)
        return allocation

    def _free(self, address: int) -> None:
        allocation, _ = self._live.pop(address)
        self._time += 1
        allocation.died = self._time

    def _use(self, num_bytes: int) -> None:
        """Note memory that is released at once."""
        allocation = self._allocate(num_bytes, WORKSPACE)
        self._time += 1
        allocation.died = self._time


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _by_kind(allocations: Iterable[Allocation]) -> dict[str, int]:
    found: dict[str, int] = dict.fromkeys(KINDS, 0)
    for allocation in allocations:
        found[allocation.kind] += allocation.num_bytes
    return found


def make_fake_mode() -> FakeTensorMode:
    """The mode in which tensors have shapes and no data; constants of a model may be real ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of a number of ranks that do not exist: collectives return at once; not inside of a fake mode."""
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
