"""Tables of runs, one row each."""

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str]) -> None:
    """Print rows as wide as they are, columns of numbers to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, justify="right" if title in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = Console(width=1000).measure(table).maximum
    Console(width=width, highlight=False).print(table, soft_wrap=True)  # a long line beats a cut one


def show_seconds(seconds: float) -> str:
    """A time as people say it: 1.43 s, 12:05 min, 3:10:00 h."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
