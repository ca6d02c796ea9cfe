"""The command `tutti`: joins the commands, each of which is imported from its module when it is called."""

import ast
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import tutti
from tutti.errors import TuttiError

# The module of each command, in the order of `tutti --help`.
MODULES = {name: name for name in ("train", "run", "doctor", "bench", "tune", "profile", "scale", "sweep", "report")}
MODULES |= {"show": "show", "list": "show", "runs": "runs", "compare": "runs", "board": "board"}
MODULES |= dict.fromkeys(("submit", "requeue", "status", "logs", "cancel"), "jobs") | {"data": "data"}
HIDDEN = {"requeue"}  # called by job scripts
MARKUP = "markdown"


class Commands(TyperGroup):
    """Imports the module of the command that is called, and of no other."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, hidden=name in HIDDEN) for name in MODULES}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for name, command in self.commands.items():
            command.help = _docstring(name)
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name else None, rest


def _docstring(command: str) -> str | None:
    """Read what a command does from the source of its module, without importing it."""
    tree = ast.parse(Path(__file__).with_name(f"{MODULES[command]}.py").read_text())
    functions = {part.name.rstrip("_"): part for part in tree.body if isinstance(part, ast.FunctionDef)}
    return ast.get_docstring(functions[command])


def _load(command: str) -> Any:
    """Import a command: one of those that its module declares, or all of them as a group."""
    app = importlib.import_module(f"tutti.cli.{MODULES[command]}").app
    app.rich_markup_mode = MARKUP
    group = typer.main.get_group(app)
    return group.commands.get(command, group)


app = typer.Typer(
    name="tutti",
    cls=Commands,
    help="From solo to tutti: train one recipe on any number of ranks, and resume it exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        print(f"tutti {tutti.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; a user's mistake is one message and exit code 2."""
    try:
        app(prog_name="tutti")
    except TuttiError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
