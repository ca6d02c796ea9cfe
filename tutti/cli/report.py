"""`tutti report`: a study as one page."""

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.options import examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "tutti report runs/studies/digits/2026-11-15_101500_scale_weak",
        "tutti report runs/studies/a --compare runs/studies/b --out comparison.html",
        "tutti report runs/studies/a --collectives runs/bench/collectives/2026-11-15_101500_n4",
    )
)
def report(
    study: Annotated[Path, typer.Argument(help="The folder of a study.")],
    compare: Annotated[Path | None, typer.Option(help="Another study to compare it with.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file; figures are written next to it.", show_default="STUDY/report.html"),
    ] = None,
    collectives: Annotated[
        Path | None,
        typer.Option(
            help="A run of tutti bench collectives, to compare the communication of a scaling study with.",
            metavar="RUN",
        ),
    ] = None,
) -> None:
    """Show a study on one page: conclusions, figures, points and conditions; also as PNG, SVG and CSV."""
    from tutti.report.study.write import write_report

    written = write_report(study, compare, out, collectives)
    for sentence in written.conclusions:
        print(sentence)
    print(f"figures:    {written.pictures}")
    print(f"points:     {written.points}")
    print(f"report:     {written.page}")
