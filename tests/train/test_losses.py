"""Losses against their formulas: that of the N-body runs, and cross entropy of sequences."""

import pytest
import torch

from tutti.train.metrics import CrossEntropy, L1Loss, Meter, accuracy


def fields(seed: int) -> torch.Tensor:
    return torch.rand(2, 5, 3, 3, 3, generator=torch.Generator().manual_seed(seed)) * 0.6 - 0.3


@pytest.mark.parametrize("lambda_rho", [0.0, 0.01, 2.0])
def test_the_loss_is_l1_and_the_share_of_the_density(lambda_rho: float) -> None:
    outputs, targets = fields(1), fields(2)
    wide = outputs.double(), targets.double()
    density, wanted = (torch.exp(14 * each[:, 0]) for each in wide)
    expected = (wide[0] - wide[1]).abs().mean() + lambda_rho * (density - wanted).abs().mean()
    assert L1Loss(lambda_rho)(outputs, targets).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_density_is_channel_0_alone() -> None:
    outputs, targets = fields(1), fields(1)
    outputs[:, 1:] += 1
    assert L1Loss(5.0)(outputs, targets).item() == pytest.approx(0.8, rel=1e-6), "four of five channels are off by one"
    assert L1Loss()(targets, targets).item() == 0


def test_gradients_are_those_of_the_formula() -> None:
    outputs, targets = fields(1).requires_grad_(), fields(2)
    L1Loss(0.5)(outputs, targets).backward()
    sign = (outputs - targets).sign().detach()
    expected = sign / outputs.numel()
    expected[:, 0] += 0.5 * sign[:, 0] * 14 * torch.exp(14 * outputs[:, 0].detach()) / outputs[:, 0].numel()
    assert outputs.grad is not None
    torch.testing.assert_close(outputs.grad, expected)


def test_half_precision_outputs_are_summed_in_single() -> None:
    outputs, targets = fields(1).bfloat16(), fields(2)
    loss = L1Loss(1.0)(outputs, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(L1Loss(1.0)(outputs.float(), targets).item())


def test_cross_entropy_of_sequences_is_the_mean_over_all_places() -> None:
    scores, targets = torch.randn(3, 6, 6), torch.randint(6, (3, 6))  # as many places as classes
    right = scores.log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    assert CrossEntropy()(scores, targets).item() == pytest.approx(-right.mean().item(), rel=1e-5)


def test_cross_entropy_of_samples_and_of_classes_that_come_second_is_that_of_torch() -> None:
    expected = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    for shape in ((4, 7), (4, 7, 5), (4, 7, 5, 3)):
        scores, targets = torch.randn(shape), torch.randint(7, (4, *shape[2:]))
        assert torch.equal(CrossEntropy(0.1)(scores, targets), expected(scores, targets))


def test_accuracy_of_sequences_counts_samples_and_means_over_places() -> None:
    meter = Meter({"accuracy": accuracy}, torch.device("cpu"))
    targets = torch.tensor([[0, 1, 2], [2, 2, 2]])
    scores = torch.nn.functional.one_hot(torch.tensor([[0, 1, 0], [2, 2, 2]]), 3).float()
    meter.add_metrics(scores, targets, 2)
    assert meter.totals()[[1, 3]].tolist() == pytest.approx([2 / 3 + 1, 2])
