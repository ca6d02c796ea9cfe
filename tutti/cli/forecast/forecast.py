"""`tutti forecast`: throughput on more ranks than were measured, and earlier forecasts beside what was measured."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.options import examples
from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.forecast.curve import ScalingCurve
    from tutti.forecast.forecast import Forecast
    from tutti.forecast.kept import CheckedForecast
    from tutti.forecast.link import KnownLink
    from tutti.forecast.population import Fabric

app = typer.Typer()


@app.command(
    epilog=examples(
        "tutti forecast runs/studies/digits/2026-11-15_101500_scale_weak --ranks 16,64",
        "tutti forecast runs/nbody/2026-11-15_1*_n4 runs/nbody/2026-11-15_1*_n8 --ranks 64 --fabric hpc",
        "tutti forecast runs/bench/nbody/2026-11-15_101500_n4 --collectives runs/bench/links --ranks 64",
        "tutti forecast --table points.csv --ranks 16,64,256 --fabric hpc --efficiency 80%",
        "tutti forecast --table one_node.csv --ranks 16 --link 200Gbit,3us --gradients 97.5MiB",
        "tutti forecast --table points.csv --out proposal --verify",
        "tutti forecast --verify",
    )
)
def forecast(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="A study of tutti scale, or runs of tutti train or tutti bench.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="A CSV file with ranks,nodes,samples_per_second of any framework.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="The numbers of ranks to forecast, as in 16,64,256.")] = None,
    nodes: Annotated[str | None, typer.Option(help="The same as numbers of full nodes.")] = None,
    fabric: Annotated[
        str | None, typer.Option(help="The network between nodes: hpc (InfiniBand, Slingshot) or tcp (Ethernet).")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks on a full node.", show_default="the most that were measured")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="What stays: the batch of a rank (weak) or of all (strong).", show_default="weak"),
    ] = None,
    efficiency: Annotated[str | None, typer.Option(help="Say whether efficiency reaches this, as in 80%.")] = None,
    link: Annotated[str | None, typer.Option(help="The rate and latency of a node's link: 200Gbit,3us.")] = None,
    collectives: Annotated[
        Path | None, typer.Option(help="The same, measured: a run of tutti bench collectives.", metavar="RUN")
    ] = None,
    gradients: Annotated[str | None, typer.Option(help="Bytes of gradients of a step, with a link: 97.5MiB.")] = None,
    band: Annotated[
        bool, typer.Option("--band", help="From one node: the range of published curves, which is no forecast.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The folder for the picture and the kept forecast.", show_default="the study")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check earlier forecasts by the runs of a study, a table, or all studies."),
    ] = False,
) -> None:
    """Forecast throughput and efficiency on more ranks than were measured, with intervals."""
    from tutti.forecast.forecast import fit_curve
    from tutti.forecast.forecast import forecast as make_forecast
    from tutti.forecast.kept import keep

    network = read_fabric(fabric)
    if verify:
        _verify(folders or [], table, mode, out, as_json)
        return
    least = 1 if link or collectives else 2
    curve, size, workload = _read(folders or [], table, mode, ranks_per_node, least)
    asked = _asked(ranks, nodes, curve)
    threshold = read_share(efficiency) if efficiency is not None else None
    known = read_link(curve, link, collectives, gradients, size)
    is_band = band and curve.most_nodes == 1 and known is None
    made = make_forecast(fit_curve(curve, network, known, alone=band), asked, threshold)
    written: list[tuple[str, Path]] = []
    if folder := out or _one_study(folders):
        written += (
            []
            if is_band
            else [("kept:", keep(folder, curve, network, known.source if known else None, made, workload))]
        )
        if out or not as_json:
            written += [("picture:", _draw(folder, curve, made, is_band))]
    if as_json:
        print(json.dumps([_plain(curve, each, is_band) for each in made], indent=1))
    else:
        _show(curve, made, threshold, is_band, written)


def read_link(
    curve: "ScalingCurve", link: str | None, collectives: Path | None, gradients: str | None, size: float | None
) -> "KnownLink | None":
    """The link that is given or was measured apart."""
    from tutti.forecast.link import given_link, measured_link, parse_size

    size = parse_size(gradients) if gradients is not None else size
    if link is not None and collectives is not None:
        raise ConfigError("--link and --collectives are given: expected one of them. Leave out --link.")
    if link is not None:
        return given_link(curve, link, size)
    return measured_link(curve, collectives, size) if collectives is not None else None


def _one_study(folders: "list[Path] | None") -> Path | None:
    """The folder if it is that of a study, where forecasts are kept."""
    from tutti.forecast.studies import is_study

    return folders[0] if folders and len(folders) == 1 and is_study(folders[0]) else None


def _read(
    folders: list[Path], table: Path | None, mode: str | None, ranks_per_node: int | None, least: int = 2
) -> "tuple[ScalingCurve, float | None, str | None]":
    """The curve, the bytes of gradients where they are known, and the workload of a study or of runs."""
    from tutti.forecast.runs import read_runs
    from tutti.forecast.studies import read_study
    from tutti.forecast.table import check_curve, read_table
    from tutti.study.scale import read_mode

    if ranks_per_node is not None and ranks_per_node < 1:
        raise ConfigError(f"--ranks-per-node {ranks_per_node}: expected 1 or more.")
    if bool(folders) == (table is not None):
        given = "both are" if folders else "none is"
        raise ConfigError(f"{given} given: expected the folder of a study or --table FILE. Give one of them.")
    if study := _one_study(folders):
        if mode is not None:
            raise ConfigError(
                f"--mode {mode}: a study knows its mode: expected --mode with --table only. Leave it out."
            )
        found = read_study(study)
        return found.curve(ranks_per_node, least), found.gradient_bytes, found.workload
    if table is None:
        found = read_runs(folders, read_mode(mode) if mode else None)
        return found.curve(ranks_per_node, least), found.gradient_bytes, found.workload
    runs = read_table(table)
    return check_curve(runs, read_mode(mode or "weak"), ranks_per_node, f"--table {table}", least), None, None


def read_fabric(text: str | None) -> "Fabric | None":
    """The network that --fabric names."""
    from tutti.errors import nearest
    from tutti.forecast.population import Fabric

    if text is None:
        return None
    names = [each.value for each in Fabric]
    if text not in names:
        raise ConfigError(
            f"--fabric {text}: expected hpc (InfiniBand, Slingshot, Aries) or tcp (Ethernet).{nearest(text, names)}"
        )
    return Fabric(text)


def _asked(ranks: str | None, nodes: str | None, curve: "ScalingCurve") -> list[int]:
    """The numbers of ranks of --ranks and --nodes, in order."""
    if ranks is None and nodes is None:
        raise ConfigError("--ranks is missing. Add the numbers of ranks to forecast, for example --ranks 16,64,256.")
    found: set[int] = set()
    for option, text, times in (("--ranks", ranks, 1), ("--nodes", nodes, curve.ranks_per_node)):
        words = [word.strip() for word in text.split(",")] if text is not None else []
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise ConfigError(f"{option} {text}: expected whole numbers of 1 or more, for example {option} 16,64,256.")
        found |= {int(word) * times for word in words}
    return sorted(found)


def read_share(text: str) -> float:
    """An efficiency as 80%, 80 or 0.8."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    value = value / 100 if text.strip().endswith("%") or value > 1 else value
    if not 0 < value <= 1:
        raise ConfigError(f"--efficiency {text}: expected a share from 0 to 100%, for example --efficiency 80%.")
    return value


def _plain(curve: "ScalingCurve", each: "Forecast", is_band: bool) -> dict[str, Any]:
    """One forecast as JSON; a band has no middle."""
    values = dataclasses.asdict(each)
    values["efficiency90"] = [curve.efficiency(each.ranks, end) for end in each.interval90]
    values["probability_of_efficiency"] = values.pop("above")
    if is_band:
        values |= {"samples_per_second": None, "efficiency": None, "basis": f"not a forecast: {each.basis}"}
    return values


def _draw(folder: Path, curve: "ScalingCurve", made: "list[Forecast]", is_band: bool) -> Path:
    from tutti.report.forecast import draw_forecast
    from tutti.runs.folder import check_writable

    check_writable(str(folder), "--out FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    return draw_forecast(folder / "forecast.png", curve, made, is_band)


def _show(
    curve: "ScalingCurve",
    made: "list[Forecast]",
    threshold: float | None,
    is_band: bool,
    written: list[tuple[str, Path]],
) -> None:
    from tutti import units
    from tutti.forecast.forecast import TITLES, sentences, table_rows

    units.print_table(TITLES, table_rows(curve, made, not is_band), left=())
    if is_band:
        print("This is not a forecast: one node does not show the link. The band is where published curves lie.")
    else:
        print(*sentences(curve, made, threshold), sep="\n")
    for name, path in written:
        print(f"{name:<11} {path}")


def _verify(folders: list[Path], table: Path | None, mode: str | None, out: Path | None, as_json: bool) -> None:
    """Set earlier forecasts of the same workload beside the runs of a study, of a table, or of all studies in --out."""
    from tutti.errors import FolderError
    from tutti.forecast.kept import check_forecasts, find_open, read_kept, summarise_checks
    from tutti.forecast.studies import check_study, find_studies, read_finished, read_study

    study = _one_study(folders)
    if folders and study is None:
        raise ConfigError(f"--verify {folders[0]}: expected the folder of a study, --table FILE, or neither.")
    root = out or (study.resolve().parent if study else Path("runs"))
    if table is not None and out is None:
        raise ConfigError("--verify: expected --out FOLDER, where the forecasts of this table are kept.")
    places = list(dict.fromkeys([root, *find_studies(root)])) if table is None else [root]
    kept = {place: read_kept(place) for place in places}
    every = [each for found in kept.values() for each in found]
    if table is not None:
        curve, *_ = _read([], table, mode, None)
        checked = check_forecasts([each for each in every if each.workload is None], curve.measurements, str(table))
    else:
        found = [read_study(study)] if study else read_finished(find_studies(root)) if every else []
        checked = [each for one in found for each in check_study(every, one)]
    if not every:
        raise FolderError(f"--verify: {root} holds no forecast: expected one that tutti forecast kept.")
    checked.sort(key=lambda each: each.created)
    still_open = find_open(every, checked) if study is None else []  # runs of other studies may have checked the rest
    if as_json:
        record = summarise_checks(checked)
        plain = [dataclasses.asdict(each) | {"error": each.error} for each in checked]
        waiting = [
            {"digest": one.digest, "created": one.created, **dataclasses.asdict(each)} for one, each in still_open
        ]
        values = {"checked": plain, "open": waiting, "record": dataclasses.asdict(record) if record else None}
        print(json.dumps(values, indent=1))
        return
    from tutti.report.checks import write_checks

    _print_checks(checked)
    where = {each.digest: place for place, found in kept.items() for each in found}
    print(f"page:       {write_checks(out or study or root, checked, still_open, where)}")


def _print_checks(checked: "list[CheckedForecast]") -> None:
    """Print forecasts beside what was measured, and the record over all of them."""
    from tutti import units
    from tutti.forecast.kept import describe_record

    if not checked:
        print(describe_record(checked))
        return
    titles = ("made", "ranks", "forecast", "measured", "error", "90% interval", "inside 68%", "inside 90%")
    lines = [
        [
            f"{each.created[:10]}{', after the run' if each.is_ahead is False else ''}",
            units.count(each.ranks),
            units.number(each.forecast),
            units.number(each.measured),
            f"{each.error:+.1%}",
            " to ".join(map(units.number, each.interval90)),
            "yes" if each.is_inside(each.interval68) else "no",
            "yes" if each.is_inside(each.interval90) else "no",
        ]
        for each in checked
    ]
    units.print_table(titles, lines)
    print(describe_record(checked))
