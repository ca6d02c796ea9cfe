"""Batch norm over ranks; its arithmetic is the same on all devices and is tested on a CPU."""

import pytest
import torch
from hvd_optimizer_work import normalize_alone, normalize_nothing, normalize_over_ranks
from rank_jobs import run_ranks

from tutti.horovod.torch.collectives import SyncBatchNorm

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("dtype", "momentum", "affine", "tracks"),
    [
        (torch.float32, 0.1, True, True),
        (torch.float32, None, False, True),
        (torch.float32, 0.1, True, False),
        (torch.bfloat16, 0.1, True, True),
    ],
    ids=str,
)
def test_unequal_batches_are_normalised_as_one_batch(
    dtype: torch.dtype, momentum: float | None, affine: bool, tracks: bool
) -> None:
    run_ranks(2, normalize_over_ranks, dtype, momentum, affine, tracks)


def test_a_rank_without_samples_takes_part() -> None:
    assert run_ranks(2, normalize_nothing) == [pytest.approx([0.2, 2.0])] * 2


def test_one_rank_uses_torchs_batch_norm_and_refuses_a_cpu() -> None:
    ((same, error),) = run_ranks(1, normalize_alone)
    assert same
    assert error[0] == "ValueError" and "to be on GPU" in error[1]


def test_fewer_than_two_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2D input"):
        SyncBatchNorm(2)._check_input_dim(torch.ones(2))
