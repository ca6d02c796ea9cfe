"""The tests of all hosts together: rank 0 gathers what was measured, has doubtful links measured again, and judges."""

from collections.abc import Sequence

from tutti.doctor.compare import compare_clocks
from tutti.doctor.exchange import Exchange
from tutti.doctor.findings import Finding, fault, warning
from tutti.doctor.host_tests import examine_host, look_again
from tutti.doctor.judge import judge, suspects
from tutti.doctor.plan import Plan, gather_links
from tutti.doctor.shared_folder import judge_folder
from tutti.doctor.sweep import Link, disjoint

_MOST_SECOND_LOOKS = 8  # rounds


def follow_tests(exchange: Exchange, plan: Plan, number: int) -> None:
    """Do what is to be measured on this host, and again what seemed slow."""
    exchange.put(f"measured/{number}", examine_host(exchange, plan, number))
    rounds = exchange.take("again", 2 * plan.seconds)
    if rounds:
        exchange.put(f"measured again/{number}", look_again(exchange, plan, number, rounds))


def lead_tests(exchange: Exchange, plan: Plan, strict: bool) -> tuple[dict[str, float], list[Link], list[Finding]]:
    """Rank 0's host tests with the others, and what all have found: clocks, links, and what is wrong with them."""
    count, names = len(plan.places), [place.host for place in plan.places]
    if exchange.rank not in plan.speakers:
        return {}, [], []
    answers = [examine_host(exchange, plan, 0)]
    others = exchange.collect([f"measured/{number}" for number in range(1, count)], plan.seconds)
    answers += [others.get(f"measured/{number}") for number in range(1, count)]
    silent = [names[number] for number, answer in enumerate(answers) if answer is None]
    findings = [fault(f"host {host} has stopped answering in the middle of the link tests.") for host in silent]
    links = gather_links(plan, answers)
    again = _doubt(exchange, plan, links)
    links = [link.better_of(again.get((link.first, link.second), link)) for link in links]
    clocks = {names[n]: answer["clock"][0] for n, answer in enumerate(answers) if answer and answer["clock"]}
    clocks = {names[0]: 0.0} | clocks
    errors = {n: answer["folder_error"] for n, answer in enumerate(answers) if answer and answer["folder_error"]}
    seen = {n: answer["seen"] for n, answer in enumerate(answers) if answer}
    findings += judge_folder(plan.folder, names, errors, seen) + judge(links, strict) + compare_clocks(clocks)
    pairs = sum(map(len, plan.rounds))
    if len(links) < pairs and not silent:
        findings.append(warning(f"{pairs - len(links)} of {pairs} links were not measured: the time was over."))
    return clocks, links, findings


def _doubt(exchange: Exchange, plan: Plan, links: Sequence[Link]) -> dict[tuple[str, str], Link]:
    """A second look at links that seem slow; something else may have disturbed the first."""
    number = {place.host: index for index, place in enumerate(plan.places)}
    pairs = [(number[link.first], number[link.second]) for link in suspects(links)]
    rounds = disjoint(pairs)[:_MOST_SECOND_LOOKS]
    exchange.put("again", rounds)
    if not rounds:
        return {}
    found = {"": look_again(exchange, plan, 0, rounds)}
    found |= exchange.collect([f"measured again/{n}" for n in range(1, len(plan.places))], plan.seconds)
    measured = [Link(**plain) for each in found.values() for plain in each]
    return {(link.first, link.second): link for link in measured}
