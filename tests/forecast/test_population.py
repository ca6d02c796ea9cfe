"""The population tables that come with the package."""

import json

from tutti.forecast.population import TABLE, Fabric, from_json, shipped


def test_the_shipped_tables_are_sound() -> None:
    for population in shipped().values():
        assert abs(sum(population.structures) - 1) < 1e-3
        assert min(population.structures) > 0.05
        assert 0 < population.friction.mean < 0.1
        assert 0 < population.noise < 0.15
        assert 0 < population.discrepancy < 0.15


def test_a_cloud_is_less_certain_than_an_hpc_fabric() -> None:
    hpc, tcp = shipped()[Fabric.HPC], shipped()[Fabric.TCP]
    assert tcp.noise > hpc.noise
    assert tcp.first_jump.mean > hpc.first_jump.mean
    assert hpc.two_nodes.deviation == 0 < tcp.two_nodes.deviation


def test_the_file_keeps_every_value() -> None:
    stored = json.loads(TABLE.read_text())["fabrics"]
    assert json.loads(json.dumps(from_json(stored["tcp"]).as_json())) == stored["tcp"]
