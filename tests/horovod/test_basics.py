"""What `init` refuses, and a coordinator that falls silent."""

import pytest

from tutti.horovod import basics
from tutti.horovod.engine.messages import ChannelClosed, HubChannel, LocalChannel, Response
from tutti.horovod.settings import read_settings
from tutti.horovod.torch import ops
from tutti.ranks.hub_client import HubClient


@pytest.mark.parametrize(
    ("variable", "given"), [("CYCLE_TIME", "soon"), ("FUSION_THRESHOLD", "-1"), ("START_TIMEOUT", "inf")]
)
def test_a_variable_that_is_no_number_is_refused_by_its_name(
    variable: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HOROVOD_{variable}", given)
    with pytest.raises(ValueError, match=f"HOROVOD_{variable}='{given}': expected a number, 0 or more"):
        basics.init()
    assert not basics.is_initialized()


def test_what_is_not_there_yet_is_not_taken_in_silence() -> None:
    with pytest.raises(NotImplementedError, match=r"comm=.0, 1. of 1 ranks.*Leave comm out"):
        basics.init(comm=[0, 1])
    with pytest.raises(ValueError, match=r"process_sets='some': expected a list of hvd.ProcessSet, or .dynamic."):
        ops.init(process_sets="some")
    assert not basics.is_initialized()


def test_init_forgets_the_handles_of_an_earlier_job() -> None:
    ops._handles[7] = ops._Handle([], grouped=True)
    try:
        with pytest.raises(ValueError, match="expected a list"):
            ops.init(process_sets="some")
        assert ops.synchronize(7) is None
    finally:
        ops._handles.clear()


def test_a_coordinator_that_says_nothing_ends_the_wait_at_the_deadline() -> None:
    channel = HubChannel(HubClient(0, 1).hold(), 0, 0)
    channel.respond([0], [Response("barrier")])
    assert channel.responses(60) == [Response("barrier")]
    with pytest.raises(ChannelClosed, match=r"nothing came for 0.2 s"):
        channel.responses(0.2)
    with pytest.raises(ChannelClosed, match=r"nothing came for 0.2 s"):
        LocalChannel().responses(0.2)


def test_the_log_level_is_one_of_horovods() -> None:
    assert read_settings({"HOROVOD_LOG_LEVEL": "trace"}).log_level == "DEBUG"
    assert read_settings({"HOROVOD_LOG_LEVEL": "fatal"}).log_level == "CRITICAL"
    assert read_settings({}).log_level == ""
    with pytest.raises(ValueError, match="HOROVOD_LOG_LEVEL='loud': expected one of trace, fatal, debug, info"):
        read_settings({"HOROVOD_LOG_LEVEL": "loud"})
