"""`tutti data get`: bring public data here."""

from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from tutti.data.download import get


def get_data(name: str, out: Path, mirror: str | None) -> None:
    """Fetch a dataset with a bar for each file."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns) as progress:
        tasks = {}

        def report(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=total or None)
            progress.update(tasks[file], completed=done)

        files = get(name, out, mirror, report)
    print(f"{len(files)} files of {name} in {out}")
