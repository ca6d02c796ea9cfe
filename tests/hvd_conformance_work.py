"""What ranks do in the tests against Horovod's habits; each function runs on every rank."""

import warnings
from typing import Any

import torch
from hvd_jobs import in_a_job
from torch import nn

from tutti.horovod import basics
from tutti.horovod.gradients import Compression
from tutti.horovod.torch import collectives
from tutti.horovod.torch.functions import allgather_object
from tutti.horovod.torch.optimizer import DistributedOptimizer

ROWS = [[[1, 2, 2], [2, 9]], [[0, 1], []], [[4], [4, 5]]]  # of each step and rank: in the second rank 1 has none


@in_a_job
def step_sparsely() -> list[tuple[list[bool], list[list[int]]]]:
    """One tensor by itself, in half precision, and in a group."""
    return [_step_sparsely({}), _step_sparsely({"compression": Compression.fp16}), _step_sparsely({"groups": 1})]


def _step_sparsely(options: dict[str, Any]) -> tuple[list[bool], list[list[int]]]:
    """An optimizer that takes nothing but sparse gradients, which travel dense."""
    torch.manual_seed(0)
    table, reference = nn.Embedding(10, 3, sparse=True), nn.Embedding(10, 3, sparse=True)
    reference.load_state_dict(table.state_dict())
    own = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
    optimizer = DistributedOptimizer(own, table.named_parameters(), sparse_as_dense=True, **options)
    plain = torch.optim.SparseAdam(list(reference.parameters()), lr=0.1)
    kept, rows = [], []
    for step in ROWS:
        optimizer.zero_grad()
        mine = torch.tensor(step[basics.rank()], dtype=torch.long)
        if len(mine):
            table(mine).sum().backward()
        optimizer.step()
        gradient = table.weight.grad
        assert gradient is not None
        kept.append(gradient.is_sparse)
        rows.append(gradient.coalesce().indices()[0].tolist())
        plain.zero_grad()
        (reference(torch.tensor(step[0] + step[1])).sum() / basics.size()).backward()
        plain.step()
        torch.testing.assert_close(table.weight, reference.weight)
    assert allgather_object(table.weight.tolist()) == [table.weight.tolist()] * basics.size()
    return kept, rows


@in_a_job
def exchange_without_warnings() -> list[Any]:
    """Each collective, while every warning in this process is an error, in the engine's threads too."""
    mine = torch.arange(4.0).reshape(2, 2) + basics.rank()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [
            collectives.allreduce(mine, compression=Compression.fp16).tolist(),
            collectives.allgather(mine[: basics.rank() + 1].contiguous()).tolist(),
            collectives.broadcast(mine, 1).tolist(),
            collectives.reducescatter(mine).tolist(),
            collectives.alltoall(mine).tolist(),
        ]


@in_a_job
def follow_one_output_of_a_group() -> list[list[list[float]]]:
    """A gradient goes back through one tensor of a group at a time; those of the others are zero until then."""
    found = []
    for grouped in (collectives.grouped_allreduce, collectives.grouped_allgather, collectives.grouped_reducescatter):
        tensors = [torch.ones(2, requires_grad=True) for _ in range(2)]
        outputs = grouped(tensors)
        outputs[1].backward(torch.full_like(outputs[1], 3.0))
        assert all(tensor.grad is not None for tensor in tensors)
        found.append([tensor.grad.tolist() for tensor in tensors if tensor.grad is not None])
    return found
