"""The counted work of a step, on models with known counts."""

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tutti.bench.results import Work
from tutti.bench.work import (
    Operator,
    OperatorCounter,
    count_work,
    covered,
    dispatch_costs,
    host_share,
    least_bytes,
    usual_by_name,
    usual_calls,
    working_seconds,
)

CPU = torch.device("cpu")
BATCH, INPUTS, OUTPUTS = 4, 8, 16
WEIGHTS = 4 * INPUTS * OUTPUTS
NO_CACHE = 0


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(INPUTS, OUTPUTS, bias=False)


class Reads(Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for value in input[0, :3]:
            self.seen = value.item()  # the line that is looked for
        return super().forward(input)


READS_AT = f"test_work.py:{Reads.forward.__code__.co_firstlineno + 2}"


def work_of(model: nn.Module, optimizer: torch.optim.Optimizer, cache: int = NO_CACHE, **more: Any) -> Work:
    inputs = torch.ones(BATCH, INPUTS, requires_grad=True)

    def step() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return count_work(step, CPU, model, optimizer, inputs, cache, **more)


def counted(call: Any, cache: int = NO_CACHE, device: torch.device = CPU) -> OperatorCounter:
    counter = OperatorCounter(device, cache)
    with counter:
        call()
    return counter


def test_our_operators_count_as_the_convolutions_that_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    import tutti.models.kernels.operators as kernels
    from tutti.models import strided

    class Layer(nn.Conv3d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert self.bias is not None
            return strided.down(input, self.weight, self.bias, "product", slope=0.1)

    monkeypatch.setattr(strided, "_folds", lambda volume, weight: True)
    monkeypatch.setattr(kernels, "_PROCESSORS", 1)
    model, volume = Layer(4, 64, 4, stride=2, padding=1), torch.ones(1, 4, 4, 4, 4)
    work = count_work(
        lambda: model(volume).sum().backward(), CPU, model, torch.optim.SGD(model.parameters()), volume, NO_CACHE
    )
    forward = 2 * 2**3 * 64 * 4 * 4**3
    assert work.flops == 2 * forward, "the result and the gradient of the weight"


def test_a_linear_layer_is_three_products() -> None:
    model = Linear()
    work = work_of(model, torch.optim.SGD(model.parameters()))
    assert work.flops == 3 * 2 * BATCH * INPUTS * OUTPUTS
    assert work.operators > 3
    assert work.host_share is not None and 0 <= work.host_share <= 1


def test_a_cache_that_holds_every_operator_leaves_no_bytes() -> None:
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters())
    assert work_of(model, optimizer, cache=1 << 20).bytes_moved == 0
    assert work_of(model, optimizer).bytes_moved > 6 * WEIGHTS


def test_the_least_bytes_are_weights_gradients_states_and_the_batch() -> None:
    model, batch = Linear(), torch.ones(BATCH, INPUTS)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert least_bytes(model, optimizer, [batch]) == 6 * WEIGHTS + batch.nbytes
    model(batch).sum().backward()
    optimizer.step()
    assert least_bytes(model, optimizer, {"inputs": batch}) == 8 * WEIGHTS + batch.nbytes


def test_frozen_weights_are_only_read() -> None:
    model = Linear().requires_grad_(False)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    assert least_bytes(model, optimizer, None) == 2 * WEIGHTS


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_reading_a_number_is_counted_with_its_line_and_optimizers_are_not(optimizer: Any) -> None:
    model = Reads()
    work = work_of(model, optimizer(model.parameters()))
    assert work.synchronisations == 3
    assert work.synchronises_at == (f"{READS_AT}, 3 a step",)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_step_that_reads_no_number_has_no_synchronisation(optimizer: Any) -> None:
    model = Linear()
    work = work_of(model, optimizer(model.parameters()))
    assert work.synchronisations == 0 and work.synchronises_at == ()


def test_a_condition_on_a_tensor_is_a_synchronisation() -> None:
    value = torch.ones(())
    assert sum(counted(lambda: bool(value > 0)).places.values()) == 1


def test_bytes_are_those_read_and_written() -> None:
    one, other = torch.ones(100), torch.ones(100)
    assert counted(lambda: one + other).bytes_moved == 1200
    assert counted(lambda: one.add_(other)).bytes_moved == 1200
    assert counted(lambda: one.copy_(other)).bytes_moved == 800
    assert counted(lambda: one.zero_()).bytes_moved == 400
    assert counted(lambda: one + other, cache=1200).bytes_moved == 0
    assert counted(lambda: one + other, cache=1199).bytes_moved == 1200
    assert counted(lambda: one + torch.ones(1).expand(100)).bytes_moved == 400 + 4 + 400 + 4


def test_operators_on_lists_of_tensors_count_all_of_them() -> None:
    ones, others = [torch.ones(10), torch.ones(20)], [torch.ones(10), torch.ones(20)]
    assert counted(lambda: torch._foreach_add_(ones, others)).bytes_moved == 3 * 120
    assert counted(lambda: torch._foreach_add(ones, others)).bytes_moved == 3 * 120
    assert counted(lambda: torch._foreach_add_(ones, others), cache=240).bytes_moved == 0


def test_views_and_allocations_move_nothing() -> None:
    matrix = torch.ones(4, 4)
    for call in (matrix.t, lambda: matrix.view(16), lambda: matrix[1], matrix.detach, lambda: torch.empty(100)):
        counter = counted(call)
        assert (counter.operators, counter.bytes_moved) == (0, 0)


def test_selecting_rows_does_not_read_the_whole_table() -> None:
    table, rows = torch.ones(1000, 4), torch.tensor([3, 5])
    assert counted(lambda: nn.functional.embedding(rows, table)).bytes_moved == (32 + 16) + 16 + 32


def test_what_cannot_be_counted_becomes_a_note() -> None:
    class Breaks(Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if _get_current_dispatch_mode() is not None:
                raise RuntimeError("not under a mode\nmore")
            return super().forward(input)

    model, notes = Breaks(), []
    work = work_of(model, torch.optim.SGD(model.parameters()), note=notes.append)
    assert (work.flops, work.bytes_moved) == (0, 0)
    assert work.least_bytes > 0 and work.host_share is not None
    assert notes == [
        "operations could not be counted: RuntimeError: not under a mode",
        "bytes and operators could not be counted: RuntimeError: not under a mode",
    ]


def test_the_overhead_of_calls_is_not_work() -> None:
    costs = {"aten::mm": 2.0, "aten::add": 1.0, "aten::linear": 1.0}
    assert working_seconds([Operator("aten::mm", 12.0, 0), Operator("aten::add", 9.0, 0)], costs) == 18.0
    assert working_seconds([Operator("aten::linear", 12.0, 2)], costs) == 9.0
    assert working_seconds([Operator("aten::unknown", 5.0, 0)], costs) == 4.0
    assert working_seconds([Operator("aten::mm", 1.0, 0)], {}) == 1.0
    assert working_seconds([], {}) == 0.0


def test_an_operator_that_takes_hardly_longer_than_its_call_does_no_work() -> None:
    costs = {"aten::add": 1.0, "aten::item": 0.1, "aten::mm": 2.0}
    assert working_seconds([Operator("aten::add", 3.0, 0)] * 1000, costs) == 0.0
    assert working_seconds([Operator("aten::item", 2.0, 0)] * 1000, costs) == 0.0
    assert working_seconds([Operator("aten::mm", 6.0, 0)], costs) == 0.0


def test_the_overhead_of_a_call_is_the_median_of_several() -> None:
    calls = [Operator("aten::mm", seconds, 0) for seconds in (9.0, 2.0, 3.0)]
    assert usual_by_name([*calls, Operator("aten::add", 1.0, 0)]) == {"aten::mm": 3.0, "aten::add": 1.0}


def test_a_call_that_was_interrupted_once_counts_as_the_others() -> None:
    quick, stopped = Operator("aten::mm", 2.0, 0), Operator("aten::mm", 400.0, 0)
    assert usual_calls([[quick, stopped], [quick, quick], [stopped, quick]]) == [quick, quick]


def test_steps_with_other_calls_are_not_mixed() -> None:
    short, long = [Operator("aten::mm", 2.0, 0)], [Operator("aten::mm", 2.0, 0), Operator("aten::add", 1.0, 0)]
    assert usual_calls([long, short, long]) == long
    assert usual_calls([short, long]) == short


def test_overlapping_kernels_count_once() -> None:
    assert covered([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0
    assert covered([]) == 0.0


def test_calls_of_a_training_step_have_a_known_cost() -> None:
    assert {"aten::addmm", "aten::mm", "aten::add_", "aten::item"} <= dispatch_costs().keys()


def test_the_host_has_no_share_that_could_be_seen_in_a_step_without_operators() -> None:
    assert host_share(lambda: sys.getrefcount(None), CPU) is None
