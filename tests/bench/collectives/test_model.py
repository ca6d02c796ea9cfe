"""Models over numbers of ranks, on made-up times."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tutti.bench.collectives.model import BUS_FACTORS, MessageTime, Model, fit_model, read_models

SIZES = [1024 * 4**power for power in range(9)]


def ring(
    operation: str, ranks: list[int], step: float = 1e-4, bandwidth: float = 1e9, base: float = 5e-5
) -> list[MessageTime]:
    steps = {"all_reduce": 2, "all_gather": 1}[operation]
    factor = BUS_FACTORS[operation]
    return [
        MessageTime(n, size, base + step * steps * (n - 1) + factor(n) * size / bandwidth)
        for n in ranks
        for size in SIZES
    ]


def fitted(operation: str, points: list[MessageTime], first_host_ranks: int = 1, pipelined: bool = False) -> Model:
    model = fit_model(operation, points, first_host_ranks, pipelined)
    assert model is not None
    return model


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_a_ring_predicts_ranks_that_were_not_measured(operation: str) -> None:
    model = fitted(operation, ring(operation, [2, 4, 8]))
    for unseen in ring(operation, [3, 64]):
        assert model.seconds(unseen.ranks, unseen.bytes) == pytest.approx(unseen.seconds, rel=1e-3)
    assert model.regime(64).residual.worst < 1e-3
    assert model.regime(64).measured_ranks == (2, 4, 8)


def test_one_number_of_ranks_gives_a_ring_whose_latency_grows_with_ranks() -> None:
    model = fitted("all_reduce", ring("all_reduce", [2], base=0.0))
    assert model.seconds(8, 0) == pytest.approx(14e-4, rel=1e-3)
    assert model.seconds(8, 1e12) == pytest.approx(2 * 7 / 8 * 1e12 / 1e9, rel=1e-3)
    assert model.seconds(1, 1e6) == 0


def test_ranks_on_one_host_and_on_several_have_models_of_their_own() -> None:
    inside = ring("all_reduce", [2, 4], step=1e-5, bandwidth=1e10)
    model = fitted("all_reduce", inside + ring("all_reduce", [8, 16], bandwidth=1e8), first_host_ranks=4)
    assert [regime.across_hosts for regime in model.regimes] == [False, True]
    assert model.seconds(4, 1e9) == pytest.approx(1.5 * 1e9 / 1e10, rel=0.01)
    assert model.seconds(32, 1e9) == pytest.approx(2 * 31 / 32 * 1e9 / 1e8, rel=0.01)
    assert model.seconds(4, 1e9, across_hosts=True) == pytest.approx(1.5 * 1e9 / 1e8, rel=0.01)


def test_what_all_ranks_of_a_host_share_is_seen() -> None:
    points = [MessageTime(n, size, 1e-4 * 2 * (n - 1) + 2 * (n - 1) * size / 1e9) for n in (2, 4, 8) for size in SIZES]
    regime = fitted("all_reduce", points, first_host_ranks=8).regime(8)
    assert regime.shared_seconds_per_byte == pytest.approx(1e-9, rel=0.01)
    assert regime.own_seconds_per_byte < 1e-11


def test_a_broadcast_is_a_tree_or_a_chain_by_how_it_grows() -> None:
    tree = [
        MessageTime(n, size, depth * (1e-4 + size / 1e9)) for n, depth in ((2, 1), (4, 2), (8, 3)) for size in SIZES
    ]
    chain = [MessageTime(n, size, 1e-4 * (n - 1) + size / 1e9) for n in (2, 4, 8) for size in SIZES]
    assert fitted("broadcast", tree).regime(8).form == "tree"
    assert fitted("broadcast", tree).seconds(16, 1e9) == pytest.approx(4.0, rel=0.01)
    assert fitted("broadcast", chain).regime(8).form == "chain"
    two = [point for point in chain if point.ranks == 2]
    assert fitted("broadcast", two).regime(8).form == "tree"
    assert fitted("broadcast", two, pipelined=True).regime(8).form == "chain"


def test_one_size_gives_no_model() -> None:
    assert fit_model("all_reduce", [MessageTime(2, 1024, 1e-4), MessageTime(4, 1024, 2e-4)], 1) is None


@pytest.mark.system
def test_a_model_is_read_from_json_without_torch(tmp_path: Path) -> None:
    model = fitted("all_reduce", ring("all_reduce", [2, 4]))
    path = tmp_path / "collectives.json"
    path.write_text(json.dumps({"models": [asdict(model)]}))
    assert read_models(path) == {"all_reduce": model}
    code = (
        "import sys; from pathlib import Path; from tutti.bench.collectives.model import read_models; "
        f"print(read_models(Path({str(path)!r}))['all_reduce'].seconds(8, 1e6), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(model.seconds(8, 1e6)), "False"]
