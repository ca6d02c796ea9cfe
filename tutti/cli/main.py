"""The command `tutti`: joins the commands, each of which is imported from its module when it is called."""

import sys
from typing import Annotated, Any

import typer

import tutti
from tutti.cli.options import MARKUP, LazyCommands, examples
from tutti.errors import TuttiError

# The module of each command, in the order of `tutti --help`.
MODULES = {name: name for name in ("train", "run", "plan", "doctor", "bench", "tune", "profile", "scale", "sweep")}
MODULES |= {
    "forecast": "forecast.forecast",
    "propose": "forecast.propose",
    "advise": "forecast.advise",
    "report": "runs",
}
MODULES |= dict.fromkeys(("evaluate", "apply", "export"), "runs")
MODULES |= dict.fromkeys(("new", "show", "list", "schema"), "show")
MODULES |= {"runs": "runs", "compare": "runs", "board": "board"}
MODULES |= dict.fromkeys(("submit", "requeue", "status", "logs", "cancel"), "jobs") | {"data": "data"}
HIDDEN = {"requeue"}  # called by job scripts


class Commands(LazyCommands):
    """The commands of tutti."""

    modules, hidden_commands = MODULES, HIDDEN

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would end the process without a message
            print("stopped on SIGINT", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="tutti",
    cls=Commands,
    help="From solo to tutti: train one recipe on any number of ranks, and resume it exactly.",
    epilog=examples(
        "tutti train digits -n 2",
        "tutti train --help",
        "tutti new planets",
    ),
    no_args_is_help=True,
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
