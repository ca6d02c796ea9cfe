"""Results of measurements that are damaged in any way are read or refused by name."""

import json
from dataclasses import asdict
from pathlib import Path

from damage import damaged_json, many, read_or_refuse
from hypothesis import given
from made_up import made_up

from tutti.bench.collectives.results import FILE, Dropped, Measured, Results, read_results
from tutti.bench.results import Ceilings, Work, read_measurements, write_measurements
from tutti.study.links import read_all_reduce

MEASUREMENT = made_up(
    ranks=2,
    trials=2,
    computing=0.5,
    settings={"epochs": 2},
    work=Work(1e9, 1e6, 1e5, 3, 1, ("model.py:12, 3 a step",)),
    ceilings=(Ceilings(1e12, 1e10),) * 2,
)
MEASUREMENTS = json.loads(json.dumps({"format": 1, "measurements": [asdict(MEASUREMENT)]}))
COLLECTIVES = Results(
    {"hosts": ["n1", "n1"], "backend": "gloo", "device": "cpu"},
    [Measured("all_reduce", 2, 1, size, 5, (size * 1e-9 + 1e-4,) * 2) for size in (1000, 100_000, 10_000_000)],
    [Dropped("broadcast", 2, 10**9, 3.5)],
)


def test_measurements_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_measurements(tmp_path / "bench.json", [MEASUREMENT], {})
    (found,) = read_measurements(tmp_path / "bench.json")
    assert json.dumps(asdict(found)) == json.dumps(asdict(MEASUREMENT))


@many(150)
@given(content=damaged_json(MEASUREMENTS))
def test_damaged_measurements_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bench.json"
    path.write_bytes(content)
    found = read_or_refuse(lambda: read_measurements(path), path)
    assert found is None or all(each.trials >= 1 for each in found)


@many(150)
@given(content=damaged_json(json.loads(json.dumps(COLLECTIVES.content()))))
def test_damaged_measurements_of_collectives_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    found = read_or_refuse(lambda: read_results(tmp_path), path)
    assert found is None or all(each.trials_seconds for each in found.points)
    model = read_or_refuse(lambda: read_all_reduce(tmp_path), tmp_path)
    assert model is None or model[0].seconds(4, 1e6) is not None
