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
