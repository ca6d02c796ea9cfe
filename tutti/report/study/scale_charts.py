"""The charts of a scaling study: throughput, efficiency, parts of a step, communication."""

from collections.abc import Callable, Sequence

from tutti import units
from tutti.report.study.charts import NO_COLOUR, Chart, ChartAxis, Curve, Study, axis_along, log_axis
from tutti.runs.step_parts import StepPart
from tutti.study.conclusions import GOOD
from tutti.study.efficiency import Estimate, ScalePoint, Scaling

PART_COLOURS = {
    StepPart.COMPUTE: 0,
    StepPart.COMMUNICATION: 1,
    StepPart.STRAGGLER: 3,
    StepPart.DATA: 4,
    StepPart.OTHER: 6,
}


def scale_charts(studies: Sequence[Study]) -> list[Chart]:
    """Returns all charts for which the studies have data."""
    known = [study for study in studies if study.analysis.scaling]
    if not known:
        return []
    found = [_throughput(known), _efficiency(known), _parts(known), _communication(known), _forecast(known)]
    return [chart for chart in found if chart]


def _throughput(studies: Sequence[Study]) -> Chart:
    curves = []
    for index, study in enumerate(studies):
        points = _scaling(study).points
        curves.append(
            _with_intervals(study.name, points, lambda point: point.speed, _speed_text, colour=index, style=index)
        )
        curves += _single_runs(study, index)
        ideal = [points[0].speed.value * point.ranks / points[0].ranks for point in points]
        name = "ideal" if len(studies) == 1 else f"ideal, {study.name}"
        curves.append(
            Curve(name, [point.ranks for point in points], ideal, colour=NO_COLOUR, style=1 + index, marks=False)
        )
    return Chart(
        "throughput",
        "Throughput",
        "Samples per second of all ranks: medians with 95% intervals, runs as small markers (crosses: outliers), "
        "and ideal scaling from the smallest number of ranks.",
        axis_along("ranks", _all_ranks(studies), log=True),
        log_axis("samples/s", [value for curve in curves for value in curve.y]),
        tuple(curves),
    )


def _efficiency(studies: Sequence[Study]) -> Chart:
    def text(point: ScalePoint) -> str:
        return f"{_of(point)}<br>efficiency {point.efficiency.percent(1)}"

    curves = [
        _with_intervals(study.name, _scaling(study).points, lambda point: point.efficiency, text, colour=i, style=i)
        for i, study in enumerate(studies)
    ]
    ranks = sorted(set(_all_ranks(studies)))
    ends = [ranks[0], ranks[-1]]
    curves.append(Curve(units.percent(GOOD), ends, [GOOD, GOOD], colour=NO_COLOUR, style=1, marks=False))
    highest = max(point.efficiency.high for study in studies for point in _scaling(study).points)
    return Chart(
        "efficiency",
        "Efficiency",
        "Samples per second and rank relative to the smallest number of ranks, with 95% bootstrap intervals over runs "
        "and log windows.",
        axis_along("ranks", ranks, log=True),
        ChartAxis("efficiency", percent=True, least=0.0, most=max(1.1, 1.05 * highest)),
        tuple(curves),
    )


def _parts(studies: Sequence[Study]) -> Chart | None:
    bars = [(study, point) for study in studies for point in _scaling(study).points if point.shares]
    if not bars:
        return None
    bars.sort(key=lambda each: each[1].ranks)
    several = len(studies) > 1
    places = [f"{p.ranks}, {study.name}" if several else str(p.ranks) for study, p in bars]
    curves = [
        Curve(
            part.value,
            places,
            [point.shares[part] for _, point in bars],
            [_part_text(point, part) for _, point in bars],
            colour=PART_COLOURS[part],
        )
        for part in PART_COLOURS
    ]
    return Chart(
        "parts",
        "Parts of a step",
        "Shares of a step by number of ranks. Communication is the exposed part, which is not hidden behind the "
        "backward pass. Straggler is the time that ranks wait for the slowest one.",
        ChartAxis("ranks"),
        ChartAxis("share of a step", percent=True, least=0.0, most=1.0),
        tuple(curves),
        kind="bars",
    )


def _communication(studies: Sequence[Study]) -> Chart | None:
    """Exposed communication per step, beside an all-reduce over measured links if there are any."""
    curves = []
    for index, study in enumerate(studies):
        scaling = _scaling(study)
        points = [point for point in scaling.points if point.ranks > 1 and point.seconds(StepPart.COMMUNICATION)]
        if not points:
            continue
        curves.append(_with_intervals(study.name, points, _exposed_ms, _exposed_text, colour=index, style=index))
    if not curves:
        return None
    curves += _by_links(studies)
    links = next((study.analysis.links for study in studies if study.analysis.links), None)
    source = f" For comparison: one all-reduce of the gradients by the collectives of {links.source}." if links else ""
    return Chart(
        "communication",
        "Exposed communication",
        f"Time per step in which ranks only wait for averaged gradients.{source}",
        axis_along("ranks", [ranks for ranks in _all_ranks(studies) if ranks > 1], log=True),
        ChartAxis("ms per step", least=0.0),
        tuple(curves),
    )


def _forecast(studies: Sequence[Study]) -> Chart | None:
    """Efficiency on more ranks than were measured, beside the measured one."""
    known = [(index, study) for index, study in enumerate(studies) if study.forecast and study.forecast.made]
    if not known:
        return None
    curves: list[Curve] = []
    for index, study in known:
        several = len(known) > 1
        colours = (index, index) if several else (0, 1)
        curves += _forecast_curves(study, colours, f", {study.name}" if several else "")
    ranks = sorted({float(place) for curve in curves for place in curve.x})
    ends = [ranks[0], ranks[-1]]
    wished = known[0][1].forecast.threshold if known[0][1].forecast else GOOD
    curves.append(Curve(units.percent(wished), ends, [wished, wished], colour=NO_COLOUR, style=1, marks=False))
    highest = max(value or 0.0 for curve in curves for value in (curve.high or curve.y))
    return Chart(
        "forecast",
        "Forecast",
        "Efficiency on more ranks than were measured (hollow, with the 90% interval of a new run as a band), from the "
        "measured points (filled). It does not know other algorithms of the collectives at a larger scale, switches "
        "further up, or the file system.",
        axis_along("ranks", ranks, log=True),
        ChartAxis("efficiency", percent=True, least=0.0, most=max(1.1, 1.05 * highest)),
        tuple(curves),
    )


def _forecast_curves(study: Study, colours: tuple[int, int], suffix: str) -> list[Curve]:
    assert study.forecast is not None and study.forecast.curve is not None
    curve, made = study.forecast.curve, study.forecast.made
    last = curve.measurements[-1]
    at_last = curve.efficiency(last.ranks, last.samples_per_second)
    ends = [[curve.efficiency(each.ranks, each.interval90[end]) for each in made] for end in (0, 1)]
    asked = [each.ranks for each in made]
    texts = [
        f"{units.count(each.ranks, 'rank')} on {units.count(each.nodes, 'node')}<br>forecast "
        f"{units.interval(units.percent, each.efficiency, low, high)}"
        for each, low, high in zip(made, *ends, strict=True)
    ]
    measured = [(each.ranks, curve.efficiency(each.ranks, each.samples_per_second)) for each in curve.measurements]
    return [
        Curve(
            f"90% interval{suffix}",
            [last.ranks, *asked],
            [None] * (len(made) + 1),
            low=[at_last, *ends[0]],
            high=[at_last, *ends[1]],
            colour=colours[1],
            band=True,
        ),
        Curve(
            f"measured{suffix}",
            [ranks for ranks, _ in measured],
            [value for _, value in measured],
            [f"{units.count(ranks, 'rank')}<br>measured {units.percent(value, 1)}" for ranks, value in measured],
            colour=colours[0],
            style=0,
        ),
        Curve(
            f"forecast{suffix}",
            asked,
            [each.efficiency for each in made],
            texts,
            colour=colours[1],
            style=1,
            hollow=True,
        ),
    ]


def _by_links(studies: Sequence[Study]) -> list[Curve]:
    """Returns the time of one all-reduce of the gradients by the model of collectives; once if studies share it."""
    known = {
        tuple((e.ranks, e.seconds) for e in study.analysis.links.comparisons): study
        for study in studies[::-1]
        if study.analysis.links
    }
    curves = []
    for pairs, study in reversed(known.items()):
        assert study.analysis.links is not None
        name = f"all-reduce, {study.name}" if len(known) > 1 else "all-reduce by the links"
        texts = [
            f"{each.ranks} ranks<br>all-reduce of {each.size} by the links: {units.duration(each.seconds)}"
            f"<br>exposed: {each.ratio.percent()} of it"
            for each in study.analysis.links.comparisons
        ]
        ranks, values = [ranks for ranks, _ in pairs], [1e3 * seconds for _, seconds in pairs]
        curves.append(Curve(name, ranks, values, texts, colour=NO_COLOUR, style=2))
    return curves


def _with_intervals(
    name: str,
    points: Sequence[ScalePoint],
    value: Callable[[ScalePoint], Estimate],
    text: Callable[[ScalePoint], str],
    colour: int,
    style: int,
) -> Curve:
    estimates = [value(point) for point in points]
    return Curve(
        name,
        [point.ranks for point in points],
        [each.value for each in estimates],
        [text(point) for point in points],
        [each.low for each in estimates],
        [each.high for each in estimates],
        colour=colour,
        style=style,
    )


def _single_runs(study: Study, index: int) -> list[Curve]:
    """Returns every run as a small marker, outliers as crosses."""
    curves = []
    for is_outlier in (False, True):
        runs = [(run, run.speed) for run in study.analysis.runs if run.speed and run.is_outlier == is_outlier]
        if runs:
            name = f"{'outliers' if is_outlier else 'runs'}, {study.name}"
            texts = [f"{run.id}<br>{units.count(round(speed.median))} samples/s, {name}" for run, speed in runs]
            ranks, speeds = [run.outcome.point.ranks for run, _ in runs], [speed.median for _, speed in runs]
            curves.append(
                Curve(
                    name,
                    ranks,
                    speeds,
                    texts,
                    colour=index,
                    line=False,
                    faint=not is_outlier,
                    crossed=is_outlier,
                    in_legend=False,
                )
            )
    return curves


def _scaling(study: Study) -> Scaling:
    assert study.analysis.scaling is not None
    return study.analysis.scaling


def _all_ranks(studies: Sequence[Study]) -> list[float]:
    return [point.ranks for study in studies for point in _scaling(study).points]


def _of(point: ScalePoint) -> str:
    return f"{point.ranks} rank{'' if point.ranks == 1 else 's'}, n = {point.runs} ({point.windows} windows)"


def _speed_text(point: ScalePoint) -> str:
    low, value, high = (units.count(round(each)) for each in (point.speed.low, point.speed.value, point.speed.high))
    return f"{_of(point)}<br>{value} samples/s ({low} to {high})"


def _part_text(point: ScalePoint, part: StepPart) -> str:
    seconds = f", {units.duration(point.shares[part] * point.step_seconds)}" if point.step_seconds else ""
    return f"{_of(point)}<br>{part} {units.percent(point.shares[part], 1)}{seconds}"


def _exposed(point: ScalePoint) -> Estimate:
    found = point.seconds(StepPart.COMMUNICATION)
    assert found is not None
    return found


def _exposed_ms(point: ScalePoint) -> Estimate:
    found = _exposed(point)
    return Estimate(1e3 * found.value, 1e3 * found.low, 1e3 * found.high)


def _exposed_text(point: ScalePoint) -> str:
    found = _exposed(point)
    return f"{_of(point)}<br>{units.interval(units.duration, found.value, found.low, found.high)}"
