"""Which failures are consequences of another rank's, and which is the first cause."""

import pytest
import torch.distributed as dist

from tutti.errors import Cause, RankLost
from tutti.ranks.failures import ConnectionToRankLost, describe, first_cause, from_exit_code, is_consequence


@pytest.mark.parametrize(
    "text",
    [
        "cannot restore the state of the simulation",
        "the feature store is empty",
        "timed out while reading the calibration",
        "a socket of the lamp is loose",
        "peer review failed",
        "connection reset by peer",
    ],
)
def test_an_error_of_a_users_code_is_the_first_cause_whatever_it_says(text: str) -> None:
    own = describe(1, RuntimeError(text), 1, said=False)
    assert not own.consequence
    lost = describe(0, dist.DistNetworkError("failed to recv, got 0 bytes"), 1, said=False)
    assert lost.consequence and lost.time >= own.time
    assert first_cause([lost, own]) == own


@pytest.mark.parametrize(
    "error",
    [
        ConnectionToRankLost("rank 1 has ended"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:61"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600ms for recv"),
        RuntimeError("Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/rank.cc:3] no error"),
        dist.DistNetworkError("Connection was likely closed. Did the remote server shutdown or crash?"),
        dist.DistStoreError("wait timeout after 300000ms, keys: /start/0/open"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
    ],
)
def test_errors_of_connections_between_ranks_are_consequences(error: Exception) -> None:
    assert is_consequence(error)


def test_a_rank_that_reports_another_lost_or_was_ended_by_the_agent_is_no_first_cause() -> None:
    lost = describe(0, RankLost("missing rank 1"), RankLost.exit_code, said=True)
    ended = from_exit_code(2, -15)
    assert lost.consequence and ended.consequence
    killed = from_exit_code(1, -9)
    assert first_cause([], [ended, killed]) == killed
    assert (killed.cause, first_cause([lost], [killed])) == (Cause.RANK_LOST, killed)
