"""`tutti compare`: runs side by side."""

from collections.abc import Sequence
from pathlib import Path

from tutti.cli.tables import print_table, show_seconds
from tutti.errors import ConfigError
from tutti.report.runs import RunOutcome, difference_rows, read_run, result_rows
from tutti.runs.folder import RunFolder
from tutti.runs.listing import find_run, name_runs

_FORMATS = (".png", ".svg", ".pdf")


def compare(given: Sequence[str], out: Path, plot: Path | None) -> None:
    """Print what differs between runs and what came out of each; draw their curves where asked."""
    if plot is not None:
        _check_plot(plot)
    named = name_runs(_find(given, out))
    runs = {name: read_run(folder) for name, folder in named.items()}
    _print(runs, [str(folder.path) for folder in named.values()])
    if plot is not None:
        _draw(runs, plot)


def _find(given: Sequence[str], out: Path) -> list[RunFolder]:
    if len(given) < 2:
        raise ConfigError(
            f"tutti compare {' '.join(given)}: expected two runs or more. Name others, as `tutti runs` does."
        )
    found: dict[Path, tuple[str, RunFolder]] = {}
    for word in given:
        folder = find_run(word, out)
        place = folder.path.resolve()
        if place in found:
            raise ConfigError(f"{found[place][0]} and {word} are the same run, {place}: name every run once.")
        found[place] = (word, folder)
    return [folder for _, folder in found.values()]


def _print(runs: dict[str, RunOutcome], folders: list[str]) -> None:
    titles = ["", *runs]
    differences = difference_rows([*runs.values()])
    results = result_rows([*runs.values()], show_seconds)
    blank = [""] * len(titles)
    rows = [[row.title, *row.texts] for row in differences] or [["nothing differs", *blank[1:]]]
    rows += [blank, *([row.title, *row.texts] for row in results), blank, ["run folder", *folders]]
    print_table(titles, rows, numbers=())


def _check_plot(plot: Path) -> None:
    if plot.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {plot}: expected a file that ends in {', '.join(_FORMATS)}.")
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent}. Make it, or choose another place.")


def _draw(runs: dict[str, RunOutcome], plot: Path) -> None:
    from tutti.report.curves import draw_comparison

    try:
        draw_comparison(runs, plot)
    except OSError as error:
        raise ConfigError(f"--plot {plot}: cannot be written: {error.strerror or error}.") from error
    print(f"curves: {plot}")
