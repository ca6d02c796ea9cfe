"""The kernels of max-pooling give torch's numbers: interpreted on the CPU, where triton is installed."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed: torch for CPUs comes without it")

PROGRAM = """
import torch
import torch.nn.functional as F
import tutti.models.pool_kernels

for kind in (torch.float32, torch.bfloat16):
    for shape in ((2, 16, 6, 4), (1, 16, 2, 12)):
        images = torch.randn(shape, generator=torch.Generator().manual_seed(1)).relu()  # with ties at zero
        images = images.to(kind).to(memory_format=torch.channels_last)
        ours, torchs = images.clone().requires_grad_(), images.float().requires_grad_()
        pooled, expected = torch.ops.tutti.max_pool(ours)[0], F.max_pool2d(torchs, 3, 2, 1)
        assert torch.equal(pooled.float(), expected)
        grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(kind)
        pooled.backward(grad)
        expected.backward(grad.float())
        assert ours.grad.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(ours.grad.float(), torchs.grad, rtol=0.008, atol=1e-6)  # bf16, truncated
"""


def test_pooling_and_its_gradient_are_those_of_torch() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=600)
