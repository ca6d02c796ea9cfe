"""One Slurm for all tests of a session that ask for it; after each of them its jobs are gone and its nodes idle."""

from collections.abc import Iterator

import pytest
import slurm


@pytest.fixture(scope="session")
def one_cluster() -> Iterator[slurm.Cluster]:
    if reason := slurm.unavailable():
        pytest.skip(reason)
    with slurm.running() as cluster:
        yield cluster


@pytest.fixture
def cluster(one_cluster: slurm.Cluster) -> Iterator[slurm.Cluster]:
    """The cluster, for tests in the group `slurm`: one worker has it."""
    yield one_cluster
    one_cluster.clear()
