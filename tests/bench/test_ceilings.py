"""Measured peaks of a device, and the sizes of its caches."""

import os
from pathlib import Path

import pytest
import torch

from tutti.bench.ceilings import cache_bytes, measure_ceilings, read_caches

CPU = torch.device("cpu")


def describe(folder: Path, core: int, index: int, level: int, kind: str, sharing: str, size: str) -> None:
    cache = folder / f"cpu{core}" / "cache" / f"index{index}"
    cache.mkdir(parents=True)
    for name, text in {"level": str(level), "type": kind, "shared_cpu_list": sharing, "size": size}.items():
        (cache / name).write_text(text + "\n")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ceilings_are_rates_that_a_computer_can_have(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.bench.ceilings._SECONDS", 0.0)
    monkeypatch.setattr("tutti.bench.ceilings._LAST_CPU_SIDE", 256)
    found = measure_ceilings(CPU, precision)
    assert 1e6 < found.flops_per_second < 1e16
    assert 1e6 < found.bytes_per_second < 1e14


def test_products_are_made_in_the_precision_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.dtype] = []
    product = torch.mm

    def spy(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = product(left, right)
        made.append(result.dtype)
        return result

    monkeypatch.setattr(torch, "mm", spy)
    monkeypatch.setattr("tutti.bench.ceilings._SECONDS", 0.0)
    monkeypatch.setattr("tutti.bench.ceilings._LAST_CPU_SIDE", 256)
    measure_ceilings(CPU, "bf16")
    assert set(made) == {torch.bfloat16}


def test_the_largest_level_counts_once_for_the_cores_that_share_it(tmp_path: Path) -> None:
    for core in range(4):
        describe(tmp_path, core, 0, 1, "Data", str(core), "32K")
        describe(tmp_path, core, 1, 1, "Instruction", str(core), "32K")
        describe(tmp_path, core, 2, 2, "Unified", str(core), "1024K")
        describe(tmp_path, core, 3, 3, "Unified", "0-1" if core < 2 else "2-3", "32768K")
    assert read_caches(tmp_path, [0, 1, 2, 3]) == [32 << 20, 32 << 20]
    assert read_caches(tmp_path, [0, 1]) == [32 << 20]


def test_caches_that_the_system_does_not_describe_are_not_guessed(tmp_path: Path) -> None:
    assert read_caches(tmp_path, [0]) == []


def test_ranks_of_one_host_share_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.bench.ceilings.read_caches", lambda *_: [32 << 20])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cache_bytes(CPU, 1) == 32 << 20
    assert cache_bytes(CPU, 4) == 8 << 20


def test_one_thread_fills_one_cache_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.bench.ceilings.read_caches", lambda *_: [16 << 20] * 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cache_bytes(CPU, 1) == 16 << 20
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert cache_bytes(CPU, 1) == 64 << 20


@pytest.mark.skipif(not Path("/sys/devices/system/cpu/cpu0/cache").exists(), reason="no description of caches here")
def test_the_caches_of_this_machine_are_found() -> None:
    assert sum(read_caches(Path("/sys/devices/system/cpu"), sorted(os.sched_getaffinity(0)))) >= 1 << 18
