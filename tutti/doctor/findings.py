"""Findings: faults and warnings, and those that follow from comparing the ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tutti import units
from tutti.doctor.facts import Facts
from tutti.ranks.group import MISSING, compare_versions, odd_ones


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with its fix."""

    level: Literal["fault", "warning"]
    text: str

    def line(self) -> str:
        return f"{self.level}: {self.text}"


def fault(text: str) -> Finding:
    return Finding("fault", text)


def warning(text: str) -> Finding:
    return Finding("warning", text)


def name_hosts(hosts: Sequence[str]) -> str:
    """'host n1', or 'hosts n1, n2'; many are cut short."""
    return f"host{'s' if len(hosts) > 1 else ''} {units.names(hosts)}"


MEMORY_BYTES_PER_RANK = 512 << 20
FOLDER_BYTES = 1 << 30
SCRATCH_BYTES = 256 << 20
SHARED_MEMORY_BYTES = 60 << 20
LOCKED_BYTES = 64 << 20
CLOCK_SECONDS = 2.0


def compare(facts: Sequence[Facts]) -> list[Finding]:
    """Findings about differences between ranks, and about limits and free space that are too small."""
    findings = [fault(text) for text in compare_versions(_named(facts), [each.fingerprint for each in facts])]
    findings += _compare_code(facts) + _compare_staged(facts) + _compare_data(facts) + _compare_devices(facts)
    for key in sorted({key for each in facts for key in each.environment}):
        values = [each.environment.get(key, "not set") for each in facts]
        findings += [warning(text) for text in _odd_ones(facts, values, lambda value, key=key: f"{key} {value}")]
    return findings + _find_shortages(facts)


def compare_clocks(offsets: Mapping[str, float]) -> list[Finding]:
    """Findings about hosts whose clocks differ from rank 0's."""
    return [
        warning(
            f"the clock of host {host} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} rank 0's: "
            f"expected less than {CLOCK_SECONDS:g} s. Times in logs are not comparable: synchronize it by NTP."
        )
        for host, offset in offsets.items()
        if abs(offset) > CLOCK_SECONDS
    ]


def _odd_ones(facts: Sequence[Facts], values: Sequence[Any], name: Callable[[Any], str]) -> Iterator[str]:
    return odd_ones(_named(facts), values, name)


def _named(facts: Sequence[Facts]) -> list[tuple[int, str]]:
    """The number and the host of each rank."""
    return [(each.rank, each.host) for each in facts]


def _compare_code(facts: Sequence[Facts]) -> list[Finding]:
    findings = []
    for module in sorted({module for each in facts for module in each.user_code}):
        values = [each.user_code.get(module, MISSING) for each in facts]
        if set(values) == {MISSING}:
            findings.append(
                fault(f"no rank finds the module {module!r} that the recipe names. Set PYTHONPATH to its folder.")
            )
        describe = _describe_code(module)
        fix = "Put the same code on all hosts."
        findings += [fault(f"{text}. {fix}") for text in _odd_ones(facts, values, describe)]
    return findings


def _describe_code(module: str) -> Callable[[str], str]:
    return lambda value: f"no module {module!r}" if value == MISSING else f"the module {module!r} with digest {value}"


def _compare_staged(facts: Sequence[Facts]) -> list[Finding]:
    """Compare what has arrived of a staged environment; the first rank of each host has examined it."""
    looked = [each for each in facts if each.staged is not None]
    if not looked:
        return []
    kinds = [each.staged.kind for each in looked if each.staged]
    fix = "Read the first lines of the job's output: they say why, on each host."
    findings = [warning(f"{text}. {fix}") for text in _odd_ones(looked, kinds, str)]
    for each in looked:
        if each.staged and each.staged.problem(each.code_folder):
            findings.append(fault(f"host {each.host} {each.staged.problem(each.code_folder)}"))
    return findings


def _compare_data(facts: Sequence[Facts]) -> list[Finding]:
    """Compare data between hosts; the first rank of each host has examined it."""
    findings = []
    looked = [each for each in facts if each.data]
    for path in sorted({path for each in looked for path in each.data}):
        values = [_describe_data(path, each.data.get(path, {"kind": MISSING})) for each in looked]
        if set(values) == {f"no {path}"}:
            findings.append(fault(f"no host has {path}, where the recipe reads its data. Set data.path, or fetch it."))
        fix = "Put the same data where every host reads it."
        findings += [fault(f"{text}. {fix}") for text in _odd_ones(looked, values, str)]
    return findings


def _describe_data(path: str, state: Mapping[str, Any]) -> str:
    kind = state["kind"]
    if kind == MISSING:
        return f"no {path}"
    if kind == "unreadable":
        return f"{path} that it cannot read ({state['why']})"
    inside = f"{units.count(state['entries'], 'name')}, " if kind == "folder" else ""
    return f"{path} of {inside}{units.size(state['bytes'])} with digest {state['digest']}"


def _compare_devices(facts: Sequence[Facts]) -> list[Finding]:
    values = [", ".join(each.devices) or "no GPU" for each in facts]
    findings = [
        fault(f"{text}. Request the same GPUs on all hosts.")
        for text in _odd_ones(facts, values, lambda value: f"visible devices: {value}" if value != "no GPU" else value)
    ]
    broken = [each for each in facts if each.device.startswith("failed")]
    return findings + [
        fault(f"rank {each.rank} on host {each.host}: its GPU {each.device}. Take the host out, or reset the GPU.")
        for each in broken
    ]


def _find_shortages(facts: Sequence[Facts]) -> list[Finding]:
    """Findings about resources that are too small for the ranks of a host."""
    findings = []
    world_size = max((each.rank for each in facts), default=0) + 1
    for host in dict.fromkeys(each.host for each in facts):
        here = [each for each in facts if each.host == host]
        for what, has, needs, fix in _needs(here, world_size):
            if 0 <= has < needs:
                findings.append(warning(f"host {host} has {what}, expected {fix}"))
    return findings


def _needs(here: Sequence[Facts], world_size: int) -> Iterator[tuple[str, int, int, str]]:
    """For each resource: its description, the amount, the needed amount, and the end of the message."""
    first, ranks = here[0], len(here)
    files, processes = 256 + 4 * world_size, 256 + 64 * ranks
    limit = min(each.limits.get("open files", -1) for each in here)
    yield (
        f"a limit of {limit:,} open files",
        limit,
        files,
        f"{files:,} for {units.count(world_size, 'rank')}. Set ulimit -n {files}.",
    )
    limit = min(each.limits.get("processes", -1) for each in here)
    text = f"{processes:,} for {units.count(ranks, 'rank')} on it. Set ulimit -u {processes}."
    yield f"a limit of {limit:,} processes", limit, processes, text
    if first.infiniband:
        locked = min(each.limits.get("locked memory", -1) for each in here)
        text = "no limit, which InfiniBand needs. Set ulimit -l unlimited."
        yield f"a limit of {units.size(locked)} of locked memory", locked, LOCKED_BYTES, text
    if first.memory_total:
        needs = MEMORY_BYTES_PER_RANK * ranks
        text = f"{units.size(needs)} for {units.count(ranks, 'rank')}. Free memory there, or start fewer ranks on it."
        yield f"{units.size(first.memory_free)} of free memory", first.memory_free, needs, text
    for what, free, needs in (
        (f"{units.size(first.folder_free)} free in {first.folder}", first.folder_free, FOLDER_BYTES),
        (f"{units.size(first.scratch_free)} free in {first.scratch}", first.scratch_free, SCRATCH_BYTES),
        (f"{units.size(first.shared_memory_free)} free in /dev/shm", first.shared_memory_free, SHARED_MEMORY_BYTES),
    ):
        yield what, free, needs, f"{units.size(needs)} or more. Free space there, or choose another folder."
