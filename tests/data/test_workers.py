"""Worker processes of a loader end with the process that started them, also where it was interrupted."""

from pathlib import Path

import pytest
from conftest import command
from prepared import PYTHON

INTERRUPTED = """
import sys
import numpy
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from tutti.data.workers import collated_samples

class Samples:
    def __len__(self):
        return 2

    def __getitem__(self, sample):
        return torch.zeros(2), 1

def interrupt(*_, **__):
    raise KeyboardInterrupt("SIGTERM")

_MultiProcessingDataLoaderIter._mark_worker_as_unavailable = interrupt  # asks a worker to end
batches = collated_samples(Samples(), [(0, numpy.arange(2))] * 9, 1, 0, torch.device("cpu"), 2)
next(batches)
try:
    batches.close()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.ranks
def test_a_process_that_is_interrupted_while_it_ends_its_workers_does_not_wait_for_them(tmp_path: Path) -> None:
    assert command(PYTHON, "-c", INTERRUPTED, cwd=tmp_path).code == 130
