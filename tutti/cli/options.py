"""Arguments and options that several commands share, and kinds of commands that typer does not have."""

import ast
import functools
import glob
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

MARKUP = "markdown"  # of help texts


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """The built-in recipes and the YAML files that begin with what was typed, each with a description."""
    from tutti.config.recipes import built_in

    folder, slash, start = incomplete.rpartition("/")
    beside = Path(f"{folder}/" if slash else ".").glob(f"{glob.escape(start)}*")
    files = sorted(path.name for path in beside if path.suffix in (".yaml", ".yml") and path.is_file())
    named = [(name, text) for name, text in built_in() if name.startswith(incomplete)]
    return named + [(f"{folder}{slash}{name}", "a recipe's file") for name in files]


Recipe = Annotated[
    str,
    typer.Argument(
        help="A recipe's name (mnist, mnist/large_batch) or the path of a YAML file.", autocompletion=complete_recipe
    ),
]
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
_DIRECTIVE = "A directive in the scheduler's own syntax; may be repeated."
Directives = Annotated[list[str] | None, typer.Option("--directive", help=_DIRECTIVE)]
JobDirectives = Annotated[list[str] | None, typer.Option("--directive", help=_DIRECTIVE, rich_help_panel=JOBS_PANEL)]
JobQueue = Annotated[str | None, typer.Option(help=_QUEUE, rich_help_panel=JOBS_PANEL)]


def examples(*lines: str) -> str:
    """Return the last paragraph of a command's help, with an example on each line: two spaces end one in Markdown."""
    return "  \n".join(("Examples:" if len(lines) > 1 else "Example:", *lines))


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


class LazyCommands(TyperGroup):
    """Commands in modules beside this one; the module of the command that is called is imported, and no other."""

    modules: ClassVar[Mapping[str, str]] = {}  # by command, in the order of --help
    hidden_commands: ClassVar[Collection[str]] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, hidden=name in self.hidden_commands) for name in self.modules}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for name, command in self.commands.items():
            command.help = self._docstring(name)
        _leave_out_types_of_flags(self, ctx)
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        for name, command in self.commands.items():
            command.help = self._docstring(name) if name.startswith(incomplete) else None
        return super().shell_complete(ctx, incomplete)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        loaded = self._load(name) if name else None
        if loaded is not None:
            _leave_out_types_of_flags(loaded, ctx)
        return name, loaded, rest

    def _docstring(self, command: str) -> str | None:
        """Read what a command does from the source of its module, without importing it."""
        path = Path(__file__).parent / f"{self.modules[command].replace('.', '/')}.py"
        tree = ast.parse(path.read_text())
        functions = {part.name.rstrip("_"): part for part in tree.body if isinstance(part, ast.FunctionDef)}
        return ast.get_docstring(functions[command])

    def _load(self, command: str) -> Any:
        """Import a command: one of those that its module declares, or all of them as a group."""
        app = importlib.import_module(f"tutti.cli.{self.modules[command]}").app
        app.rich_markup_mode = MARKUP
        group = typer.main.get_group(app)
        return group.commands.get(command, group)


def _leave_out_types_of_flags(command: Any, ctx: Any) -> None:
    """In the help of a command and of those below it; typer gives a flag the type <bool>, though it takes no value."""
    for option in command.get_params(ctx):
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _leave_out_types_of_flags(each, ctx)


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
