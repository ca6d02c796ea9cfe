"""`tutti report`: a study as one page."""

from pathlib import Path

from tutti.report.study.write import write_report


def report(folder: Path, compare: Path | None, out: Path | None, collectives: Path | None) -> None:
    """Write the report of a study, and print what it concludes."""
    written = write_report(folder, compare, out, collectives)
    for sentence in written.conclusions:
        print(sentence)
    print(f"figures:    {written.pictures}")
    print(f"points:     {written.points}")
    print(f"report:     {written.page}")
