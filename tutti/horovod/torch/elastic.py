"""Elastic training with torch: `elastic.run`, the state of a model and its optimizer, and a sampler."""

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from tutti.horovod import basics
from tutti.horovod.elastic import ObjectState, Restorable, run_fn
from tutti.horovod.torch import ops
from tutti.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class ElasticSampler(Sampler[int]):
    """Call `record_batch` after each batch and `set_epoch` at the end of each epoch."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # by all ranks, from the start of the epoch's order
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, of which nothing has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch, which is not repeated after a reset."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Divide the rest of the epoch among the ranks."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        # Samples are dealt to the ranks in turn: all ranks together have processed a prefix of the order.
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples


class StateHandler(Restorable):
    """Saves, restores and broadcasts values of one type."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Replace the value, and save the new one."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))  # an optimizer would change the saved tensors


class ModelStateHandler(_StateDictHandler):
    """For nn.Module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_StateDictHandler):
    """For torch.optim.Optimizer, distributed or not."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_StateDictHandler):
    """For ElasticSampler."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0, "sampler_state"))
        self.save()

    def reset(self) -> None:
        self.value.reset()


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the types of values with their handlers; the first that matches is used."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the types of values with their handlers."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """A model, an optimizer and any other values, each an attribute."""

    def __init__(self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any):
        given = {"model": model, "optimizer": optimizer}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        found = {name: handler for name, value in kwargs.items() if (handler := _handler(value)) is not None}
        self._handlers: dict[str, StateHandler] = found
        plain = {name: value for name, value in kwargs.items() if name not in found}
        super().__init__(broadcast_from_first, basics.rank, **plain)
        for name, handler in found.items():
            super().__setattr__(name, handler.value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_handlers" and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


def _handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


def broadcast_from_first(item: Any) -> Any:
    """Broadcast an object of rank 0; every rank must enter."""
    return broadcast_object(item, 0, "elastic_state")


__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function of a state: it resumes when ranks are lost, and continues when hosts change."""
    return run_fn(func, reset)


def reset() -> None:
    """Shut down the job and join the next one."""
    ops.shutdown()
    ops.init()
