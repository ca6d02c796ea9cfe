"""Arguments and options that several commands share."""

import functools
import inspect
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Recipe = Annotated[str, typer.Argument(help="A recipe's name (mnist, mnist/large_batch) or the path of a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, for example optim.lr=3e-4 epochs=2.")]
Ranks = Annotated[int | None, typer.Option("-n", "--ranks", help="Ranks to start on this machine.", show_default="1")]
Preflight = Annotated[bool, typer.Option("--preflight", help="Check all ranks before they train.")]
RunsFolder = Annotated[Path, typer.Option(help="The folder of run folders.")]

_ACCOUNT = "The account that is charged."
_QUEUE = "Queue, partition or QOS."
JOBS_PANEL = "As jobs of a cluster"
Account = Annotated[str | None, typer.Option(help=_ACCOUNT)]
Queue = Annotated[str | None, typer.Option(help=_QUEUE)]
JobAccount = Annotated[str | None, typer.Option(help=_ACCOUNT, rich_help_panel=JOBS_PANEL)]
JobQueue = Annotated[str | None, typer.Option(help=_QUEUE, rich_help_panel=JOBS_PANEL)]


def examples(*lines: str) -> str:
    """Return the last paragraph of a command's help, with an example on each line."""
    return "\n\n    ".join(("Examples:" if len(lines) > 1 else "Example:", *lines))


def with_options(shared: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the fields of a dataclass to the options of a command, which receives an instance as its first argument."""

    def expand(command: Callable[..., None]) -> Callable[..., None]:
        fields = inspect.signature(shared).parameters
        own = list(inspect.signature(command).parameters.values())[1:]

        @functools.wraps(command)
        def called(**given: Any) -> None:
            values = {name: given.pop(name) for name in fields}
            command(shared(**values), **given)

        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *fields.values())]
        called.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        return called

    return expand


class ResumeCommand(TyperCommand):
    """A command whose `--resume` may be given without a value, which stands for `--resume latest`.

    Click has options with an optional value; the copy of click inside typer has not.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        for word, following in zip_longest(args, args[1:]):
            words.append(word)
            if word == "--resume" and (following is None or following.startswith("-") or is_override(following)):
                words.append("latest")
        return super().parse_args(ctx, words)


def is_override(word: str) -> bool:
    """Return whether a word after `--resume` is an override, not the path of a run folder, which may contain "=" too.

    It is one if it reads KEY=VALUE and is not the path of a folder; with a slash in it, only if KEY is a recipe's.
    """
    from tutti.config.run import RunConfig

    key, equals, _ = word.partition("=")
    parts = key.split(".")
    if not equals or not all(part.isidentifier() for part in parts) or Path(word).is_dir():
        return False
    return "/" not in word or parts[0] in RunConfig.model_fields
