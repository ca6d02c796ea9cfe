"""Running statistics: one update per step with the mean over its micro-batches, on any number of ranks."""

import torch
from torch import nn

from tutti.config.layout import Layout
from tutti.parallel.batch_statistics import BatchStatistics
from tutti.parallel.mesh import Mesh


def run_step(model: nn.Module, micro_batches: list[torch.Tensor]) -> None:
    statistics = BatchStatistics(model, len(micro_batches), Mesh(Layout(1), 0, torch.device("cpu")))
    for index, batch in enumerate(micro_batches):
        statistics.before_pass(index)
        model(batch)
    statistics.after_step()


def test_a_step_of_several_passes_updates_once_with_their_mean() -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3, momentum=0.3)
    layer.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    micro_batches = [torch.randn(8, 3) * (i + 1) + i for i in range(4)]
    mean = torch.stack([batch.mean(0) for batch in micro_batches]).mean(0)
    var = torch.stack([batch.var(0) for batch in micro_batches]).mean(0)
    expected_mean = 0.7 * layer.running_mean.clone() + 0.3 * mean
    expected_var = 0.7 * layer.running_var.clone() + 0.3 * var
    run_step(layer, micro_batches)
    torch.testing.assert_close(layer.running_mean, expected_mean)
    torch.testing.assert_close(layer.running_var, expected_var)
    assert layer.num_batches_tracked.item() == 1


def test_the_order_of_micro_batches_does_not_matter() -> None:
    batches = [torch.randn(8, 3) + i for i in range(3)]
    first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for _ in range(2):
        run_step(first, batches)
        run_step(second, batches[::-1])
    torch.testing.assert_close(first.running_mean, second.running_mean)
    torch.testing.assert_close(first.running_var, second.running_var)


def test_one_pass_is_torchs_own_update() -> None:
    batch = torch.randn(16, 4)
    ours, theirs = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    run_step(ours, [batch])
    theirs(batch)
    assert torch.equal(ours.running_mean, theirs.running_mean)
    assert torch.equal(ours.running_var, theirs.running_var)
