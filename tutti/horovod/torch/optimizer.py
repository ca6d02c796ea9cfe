"""An optimizer whose gradients are reduced over ranks while the backward pass still runs."""

import inspect
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tutti.horovod import basics
from tutti.horovod.basics import ProcessSet, global_process_set
from tutti.horovod.errors import warn_deprecated
from tutti.horovod.gradients import Compression
from tutti.horovod.helpers import split_list
from tutti.horovod.torch import ops
from tutti.horovod.torch.arguments import check_adasum
from tutti.horovod.torch.functions import broadcast_object, empty_sparse, sparse_allreduce_async
from tutti.horovod.torch.ops import Adasum, Average

Unit = tuple[torch.Tensor, ...]  # parameters whose gradients are reduced together
Groups = int | list[list[torch.Tensor]] | None


def own_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the arguments that build another optimizer of this class with the same defaults."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in accepted}


def name_parameters(
    parameters: Sequence[Sequence[torch.Tensor]], named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return a name for each parameter, by which its gradients are matched over ranks: the given name, or its index."""
    if named is None:
        places = enumerate(parameters)
        return {each: f"allreduce.noname.{i}.{j}" for i, group in places for j, each in enumerate(group)}
    pairs = list(named)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = find_duplicates([name for name, _ in pairs])
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(sorted(duplicates))}"
        )
    names = {parameter: name for name, parameter in pairs}
    missing = [tuple(each.shape) for group in parameters for each in group if each not in names]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Their shapes: {', '.join(map(str, missing))}. Give the names of all parameters of the optimizer."
        )
    return names


def find_duplicates(values: Iterable[Any]) -> set[Any]:
    """Return the values that occur more than once."""
    return {value for value, count in Counter(values).items() if count > 1}


def check_groups(groups: Groups) -> None:
    """Raise ValueError for groups that are neither a number nor lists of different tensors."""
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups <= 0:
            raise ValueError(f"groups={groups!r}: expected a positive number of groups, or a list of lists of tensors.")
        return
    tensors = [each for group in groups for each in group]
    if not all(isinstance(each, torch.Tensor) for each in tensors):
        raise ValueError("groups must consist of torch.Tensor: expected a list of lists of parameters.")
    if len({id(each) for each in tensors}) < len(tensors):
        raise ValueError("A parameter can only appear once in groups.")


def form_units(parameters: Sequence[torch.Tensor], groups: Groups) -> list[Unit]:
    """Return the parameters in groups: contiguous parts, or the given groups and all other parameters one by one."""
    if groups is None:
        return [(parameter,) for parameter in parameters]
    if isinstance(groups, int):
        formed = split_list(parameters, groups)
    else:
        known, grouped = set(parameters), {parameter for group in groups for parameter in group}
        formed = [[parameter for parameter in group if parameter in known] for group in groups]
        formed += [[parameter] for parameter in parameters if parameter not in grouped]
    return [tuple(group) for group in formed if group]


TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)
ZEROED_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)
SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class with the same groups, whose `step` uses gradients reduced over ranks."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor} with op={op}: not supported with op != Average. "
            "Leave it out, or use op=hvd.Average."
        )
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError(f"{type(optimizer).__name__} is distributed already: expected the optimizer it was made from.")
    if num_groups != 0:
        warn_deprecated("Parameter `num_groups` has been replaced by `groups` and will be removed")
        groups = num_groups if groups is None else groups
    base = _DistributedOptimizer
    if op == Adasum and basics.size() > 1:
        check_adasum([each for group in optimizer.param_groups for each in group["params"]], process_set)
        base = _DistributedAdasumOptimizer
    wrapped = type(optimizer)
    namespace = {"__module__": __name__, "wrapped_class": wrapped}
    distributed: Any = type(wrapped.__name__, (base, wrapped), namespace)
    return distributed(
        optimizer.param_groups,
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
        **own_options(optimizer),
    )


class _DistributedOptimizer(torch.optim.Optimizer):
    """The base class that precedes an optimizer's own class."""

    wrapped_class: type[torch.optim.Optimizer]
    find_duplicates = staticmethod(find_duplicates)

    def __init__(
        self,
        params: Any,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: Groups,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        if backward_passes_per_step <= 0:
            raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be > 0")
        self._parameter_names = name_parameters([group["params"] for group in self.param_groups], named_parameters)
        check_groups(groups)
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._handles: dict[Unit, Callable[[], None]] = {}  # functions that wait for gradients in flight
        self._allreduce_delay: dict[torch.Tensor, int] = {}  # backward passes until a gradient is complete
        self._units: dict[torch.Tensor, Unit] = {}
        self._sparse_dims: dict[torch.Tensor, int] = {}  # of parameters that have had a sparse gradient
        self._lock = threading.Lock()  # hooks run in the threads of the backward pass
        self._synchronized = False
        self._should_synchronize = True
        alone = basics.size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"
        if not alone and process_set.included():
            self._register_hooks(groups)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes whose gradients are added up before a step."""
        self.backward_passes_per_step = passes
        self._reset_delays()

    def synchronize(self) -> None:
        """Wait until all gradients are reduced over ranks; one that was not computed on this rank counts as zeros."""
        with self._lock:
            for unit in dict.fromkeys(self._units.values()):
                if unit not in self._handles:
                    self._handles[unit] = self._submit(unit)
            handles, self._handles = self._handles, {}
            self._reset_delays()
        for wait in handles.values():
            wait()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the gradients without reducing them again, for example after `synchronize` and clipping."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients and call the wrapped class's `step`; with a closure, reduce after each of its passes."""
        if self._should_synchronize and closure is not None:
            closure = self._reducing(closure)
        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(SYNCHRONIZED_TWICE, stacklevel=2)
            self.synchronize()
        loss = super().step(closure)  # pyright: ignore[reportArgumentType]
        self._synchronized = False
        return loss

    # Otherwise torch would wrap it, and call the hooks of a step a second time.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, none of which may be in flight."""
        if self._handles or any(left != self.backward_passes_per_step for left in self._allreduce_delay.values()):
            raise AssertionError(ZEROED_TOO_EARLY)
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, and drop the gradients in flight."""
        self._handles = {}
        self._synchronized = False
        self._should_synchronize = True
        self._reset_delays()
        super().load_state_dict(state_dict)

    def _register_hooks(self, groups: Groups) -> None:
        parameters = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        if groups is not None:  # collective: all ranks use the order of the first
            names = [self._parameter_names[parameter] for parameter in parameters]
            first = (self.process_set.ranks or [0])[0]
            order = broadcast_object(names, first, "optimizer_groups", self.process_set)
            parameters.sort(key=lambda parameter: order.index(self._parameter_names[parameter]))
        for unit in form_units(parameters, groups):
            self._units |= dict.fromkeys(unit, unit)
        for parameter in parameters:
            self._allreduce_delay[parameter] = self.backward_passes_per_step
            parameter.register_post_accumulate_grad_hook(self._count_pass)

    def _reset_delays(self) -> None:
        self._allreduce_delay = dict.fromkeys(self._allreduce_delay, self.backward_passes_per_step)

    def _count_pass(self, parameter: torch.Tensor) -> None:
        """Count a backward pass of a parameter; the last one before a step starts the reduction of its gradient."""
        assert parameter.grad is not None
        assert not parameter.grad.requires_grad, "gradients of gradients (create_graph=True) cannot be reduced"
        with self._lock:
            if self._allreduce_delay[parameter] <= 0:
                raise AssertionError(TOO_MANY_PASSES)
            self._allreduce_delay[parameter] -= 1
            unit = self._units[parameter]
            if all(self._allreduce_delay[each] == 0 for each in unit):
                self._handles[unit] = self._submit(unit)

    def _submit(self, unit: Unit) -> Callable[[], None]:
        """Start to reduce gradients; return a function that waits for them and stores them in the parameters."""
        gradients = [(parameter, self._gradient(parameter)) for parameter in unit]
        sparse = [(parameter, gradient) for parameter, gradient in gradients if gradient.is_sparse]
        dense = [(parameter, gradient) for parameter, gradient in gradients if not gradient.is_sparse]
        waits = [self._submit_sparse(parameter, gradient) for parameter, gradient in sparse]
        if dense:
            waits.append(self._submit_dense(dense, len(unit) > 1))

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's gradient, or zeros where it has none, since another rank may have one."""
        gradient = parameter.grad
        if gradient is None:
            if parameter in self._sparse_dims and not self.sparse_as_dense:
                return empty_sparse(parameter, self._sparse_dims[parameter])
            return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        if gradient.is_sparse:
            self._sparse_dims[parameter] = gradient.sparse_dim()
        return gradient.to_dense() if gradient.is_sparse and self.sparse_as_dense else gradient

    def _submit_sparse(self, parameter: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
        name = self._parameter_names[parameter]
        reduced = sparse_allreduce_async(gradient, name, self.op, self.process_set)
        return lambda: _store(parameter, reduced())

    def _submit_dense(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], grouped: bool) -> Callable[[], None]:
        compressed = [self._compression.compress(gradient) for _, gradient in pairs]
        tensors = [tensor.contiguous() for tensor, _ in compressed]
        before, after = 1 / self.gradient_predivide_factor, self.gradient_predivide_factor
        rest = None, self._parameter_names[pairs[0][0]], self.op, before, after, self.process_set
        handle = ops.grouped_allreduce_async_(tensors, *rest) if grouped else ops.allreduce_async_(tensors[0], *rest)

        def wait() -> None:
            result = ops.synchronize(handle)
            outputs = result if grouped else (result,)
            for (parameter, _), (_, context), output in zip(pairs, compressed, outputs, strict=True):
                _store(parameter, self._in_layout_of(parameter, self._compression.decompress(output, context)))

        return wait

    def _in_layout_of(self, parameter: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
        """Make a gradient sparse again that was sent dense: the wrapped class may support sparse gradients only."""
        is_sparse = parameter in self._sparse_dims and (parameter.grad is None or parameter.grad.is_sparse)
        return reduced.to_sparse(self._sparse_dims[parameter]) if is_sparse else reduced

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return reduced


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """Steps each parameter locally as soon as its gradient is complete, and reduces the change of the parameter."""

    def synchronize(self) -> None:
        """Do nothing: there are no reduced gradients, and `step` waits for the changes."""

    def skip_synchronize(self) -> Any:
        """Raise AssertionError: `step` has to wait for the changes in flight."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the reduced change to every parameter."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().synchronize()
        return loss

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def _register_hooks(self, groups: Groups) -> None:
        super()._register_hooks(None)
        # By index: a loaded state creates new groups.
        self._group_indices = {each: i for i, group in enumerate(self.param_groups) for each in group["params"]}

    def _submit(self, unit: Unit) -> Callable[[], None]:
        (parameter,) = unit
        compressed, context = self._compression.compress(self._local_step(parameter))
        handle = ops.allreduce_async_(compressed.contiguous(), name=self._parameter_names[parameter], op=Adasum)

        def wait() -> None:
            with torch.no_grad():
                parameter.add_(self._compression.decompress(ops.synchronize(handle), context))

        return wait

    def _local_step(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the change that the wrapped class would make to a parameter, which itself is left unchanged."""
        all_groups, group = self.param_groups, self.param_groups[self._group_indices[parameter]]
        before = parameter.detach().clone()
        parameters, self.param_groups, group["params"] = group["params"], [group], [parameter]
        try:
            self.wrapped_class.step(self)
        finally:
            self.param_groups, group["params"] = all_groups, parameters
        with torch.no_grad():
            change = parameter - before
            parameter.copy_(before)
        return change


def _store(parameter: torch.Tensor, reduced: torch.Tensor) -> None:
    """Store a reduced gradient in its parameter; a frozen parameter without gradient keeps none."""
    if parameter.grad is None:
        parameter.grad = reduced if parameter.requires_grad else None
    elif parameter.grad.is_sparse or reduced.is_sparse:
        parameter.grad = reduced
    elif reduced is not parameter.grad:
        parameter.grad.copy_(reduced)
