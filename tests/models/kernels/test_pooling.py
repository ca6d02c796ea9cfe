"""The kernels of max-pooling give torch's numbers: on a GPU, or interpreted where there is none."""

import pytest
import torch
import torch.nn.functional as F

import tutti.models.kernels.pooling  # noqa: F401 (registers the operators)

ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 16, 6, 4), (1, 16, 2, 12)])
def test_pooling_and_its_gradient_are_those_of_torch(shape: tuple[int, ...], kind: torch.dtype) -> None:
    images = torch.randn(shape, generator=torch.Generator().manual_seed(1)).relu()  # with ties at zero
    images = images.to("cuda" if ON_GPU else "cpu", kind).to(memory_format=torch.channels_last)
    ours, torchs = images.clone().requires_grad_(), images.float().requires_grad_()
    pooled, expected = torch.ops.tutti.max_pool(ours)[0], F.max_pool2d(torchs, 3, 2, 1)
    assert torch.equal(pooled.float(), expected)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(images)
    pooled.backward(grad)
    expected.backward(grad.float())
    assert ours.grad is not None and ours.grad.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours.grad.float(), torchs.grad, rtol=0.008, atol=1e-6)  # of bf16, truncated
