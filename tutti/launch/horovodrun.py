"""`horovodrun`: start ranks here and on other hosts, as Horovod's command of that name does."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence

from tutti.errors import LaunchError, TuttiError
from tutti.launch import horovodrun_arguments as arguments


def run_commandline(words: Sequence[str] | None = None) -> None:
    """The console script; a user's mistake is one message and exit code 2."""
    try:
        code = run(sys.argv[1:] if words is None else words)
    except TuttiError as error:
        print(f"horovodrun: error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def run(words: Sequence[str]) -> int:
    """Start what the command line says; the exit code."""
    given = arguments.parse(words)
    if given.check_build:
        from tutti.launch.check_build import check_build

        print(check_build())
        return 0
    if not given.command:
        raise LaunchError("no command: expected a program for the ranks. Try: horovodrun -np 2 python train.py")
    if given.verbose and (idle := arguments.flags_without_meaning(given)):
        print(f"horovodrun: without a meaning here, and ignored: {', '.join(idle)}", file=sys.stderr)
    if arguments.is_elastic(given):
        return _run_elastic(given)
    options = arguments.static_options(given)
    if given.mpi:
        from tutti.launch.mpirun import mpirun_command

        mpi = (given.mpi_args or "", given.binding_args or "", given.tcp)
        started, environment = mpirun_command(options, given.command, *mpi)
        if given.verbose:
            print(shlex.join(started), file=sys.stderr)
        sys.stdout.flush()
        os.execvpe(started[0], started, environment)
    from tutti.launch.static_job import run_static

    return run_static(options, given.command)


def _run_elastic(given: Namespace) -> int:
    if given.mpi:
        raise LaunchError("--mpi with elastic flags: mpirun cannot change the number of ranks. Leave out --mpi.")
    options = arguments.elastic_options(given)
    from tutti.launch.elastic_driver import run_elastic

    return run_elastic(options, given.command)


if __name__ == "__main__":
    run_commandline()
