"""The tiers of the tests: logic starts no process, ranks starts real ones, system drives other programs.

A test without a mark is logic, and fails where it starts a process. Every test is measured by the CPU time of all that
it starts; the end of a run tells the share of each tier and the slowest tests.
"""

import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prepared
import pytest
from cost import cpu_seconds

TIERS = ("logic", "ranks", "system")
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
_state: dict[str, Any] = {"logic": None, "cpu": 0.0}
_told: dict[str, dict[str, Any]] = defaultdict(lambda: {"cpu": 0.0, "wall": 0.0, "tier": ""})


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test: that of its mark, of several the later one."""
    return max((mark.name for mark in item.iter_markers() if mark.name in TIERS), key=TIERS.index, default="logic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="Run the modules, and the tests of each, in a random order.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its tier; long ones come first, or all in a random order."""
    for item in items:
        tier = tier_of(item)
        if not item.get_closest_marker(tier):
            item.add_marker(tier)
    if seed := config.getoption("--shuffle"):
        _shuffle(items, random.Random(seed))


def _shuffle(items: list[pytest.Item], chance: random.Random) -> None:
    """Keep the tests of a module together, since they share what its fixtures make."""
    modules: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        modules[item.nodeid.partition("::")[0]].append(item)
    order = list(modules.values())
    chance.shuffle(order)
    for some in order:
        chance.shuffle(some)
    items[:] = [item for some in order for item in some]


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS and _state["logic"] and arguments[0] != "uname":  # which the standard library asks
        raise AssertionError(f"{_state['logic']} starts a process, {arguments[:2]}: mark it ranks or system")


if not Path("/dev/nvidiactl").exists():  # on a GPU, triton starts compilers where a kernel is first called
    sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _state["logic"] = item.nodeid if tier_of(item) == "logic" else None
    _state["cpu"] = cpu_seconds()
    if not _state["logic"]:
        prepared.server()
    try:
        return (yield)
    finally:
        _state["logic"] = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    now = cpu_seconds()
    report.user_properties = [("tier", tier_of(item)), ("cpu", max(0.0, now - _state["cpu"]))]
    _state["cpu"] = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what the phases of a test took; where several workers run, their reports arrive here."""
    properties = dict(report.user_properties)
    test = _told[report.nodeid]
    test["tier"] = properties.get("tier", "")
    test["cpu"] += float(str(properties.get("cpu", 0.0)))
    test["wall"] += report.duration


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the share of each tier and the ten tests that took most."""
    if os.environ.get("PYTEST_XDIST_WORKER") or not _told:
        return
    terminalreporter.section("time by tier")
    for tier in TIERS:
        tests = [test for test in _told.values() if test["tier"] == tier]
        cpu, wall = sum(test["cpu"] for test in tests), sum(test["wall"] for test in tests)
        terminalreporter.line(f"{tier:8} {len(tests):5} tests  {cpu / 60:6.2f} CPU minutes  {wall / 60:6.2f} minutes")
    total = sum(test["cpu"] for test in _told.values())
    terminalreporter.line(f"{'all':8} {len(_told):5} tests  {total / 60:6.2f} CPU minutes")
    terminalreporter.section("ten slowest tests: CPU seconds, seconds")
    for name, test in sorted(_told.items(), key=lambda item: -item[1]["cpu"])[:10]:
        terminalreporter.line(f"{test['cpu']:6.1f} {test['wall']:6.1f}  {name}")
    if path := os.environ.get("TUTTI_TEST_COSTS"):
        with open(path, "w") as file:
            for name, test in _told.items():
                file.write(f"{test['cpu']:.3f}\t{test['wall']:.3f}\t{test['tier']}\t{name}\n")
