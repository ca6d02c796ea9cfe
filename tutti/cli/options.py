"""Arguments and options that several commands share."""

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
Account = Annotated[str | None, typer.Option(help=_ACCOUNT)]
Queue = Annotated[str | None, typer.Option(help=_QUEUE)]

_TARGET = "METRIC=NUMBER"
StudyRecipe = Annotated[str | None, typer.Argument(help="A recipe's name or the path of a YAML file.")]
StopTarget = Annotated[
    str | None, typer.Option("--target", help="Train to this, as in valid_accuracy=0.95.", metavar=_TARGET)
]
NotedTarget = Annotated[
    str | None,
    typer.Option("--target", help="Record when this is reached, and continue training.", metavar=_TARGET),
]
StudyOut = Annotated[str | None, typer.Option(help="The folder for studies/.", show_default="the recipe's out")]
StudyResume = Annotated[str | None, typer.Option(help="Run the missing points of a study.", metavar="[latest|FOLDER]")]
Retry = Annotated[bool, typer.Option("--retry", help="With --resume: also run the failed points again.")]

_JOBS = "As jobs of a cluster"
StudyOn = Annotated[str | None, typer.Option(help="A scheduler or site: each point is a job.", rich_help_panel=_JOBS)]
JobRanksPerNode = Annotated[int | None, typer.Option(help="Ranks on each node.", rich_help_panel=_JOBS)]
JobTime = Annotated[
    str | None, typer.Option(help="Time limit of each job.", rich_help_panel=_JOBS, show_default="1:00:00")
]
JobAccount = Annotated[str | None, typer.Option(help=_ACCOUNT, rich_help_panel=_JOBS)]
JobQueue = Annotated[str | None, typer.Option(help=_QUEUE, rich_help_panel=_JOBS)]


def examples(*lines: str) -> str:
    """Return the last paragraph of a command's help, with an example on each line."""
    return "\n\n    ".join(("Examples:" if len(lines) > 1 else "Example:", *lines))


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
