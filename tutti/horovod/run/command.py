"""The command `horovodrun`: start ranks on this host and others, as the command of Horovod does."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec

from tutti.errors import LaunchError, TuttiError
from tutti.horovod import __version__
from tutti.horovod.run import arguments


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
        from tutti.horovod.run.mpirun import mpirun_command

        mpi = (given.mpi_args or "", given.binding_args or "", given.tcp)
        started, environment = mpirun_command(options, given.command, *mpi)
        if given.verbose:
            print(shlex.join(started), file=sys.stderr)
        sys.stdout.flush()
        os.execvpe(started[0], started, environment)
    from tutti.horovod.run.static_job import run_static

    return run_static(options, given.command)


def _run_elastic(given: Namespace) -> int:
    if given.mpi:
        raise LaunchError("--mpi with elastic flags: mpirun cannot change the number of ranks. Leave out --mpi.")
    options = arguments.elastic_options(given)
    from tutti.horovod.run.driver import run_elastic

    return run_elastic(options, given.command)


# Each framework with the module that scripts of it import, and its own.
_FRAMEWORKS = {
    "TensorFlow": ("tutti.horovod.tensorflow", "tensorflow"),
    "PyTorch": ("tutti.horovod.torch", "torch"),
    "MXNet": ("tutti.horovod.mxnet", "mxnet"),
}


def check_build() -> str:
    """The table."""
    gloo, nccl = _torch_backends()
    groups = {
        "Available Frameworks": {name: all(map(_is_here, modules)) for name, modules in _FRAMEWORKS.items()},
        "Available Controllers": {"MPI": False, "Gloo": gloo},
        "Available Tensor Operations": {"NCCL": nccl, "DDL": False, "CCL": False, "MPI": False, "Gloo": gloo},
    }
    lines = [f"Horovod v{__version__}:"]
    for title, rows in groups.items():
        lines += ["", f"{title}:", *(f"    [{'X' if here else ' '}] {name}" for name, here in rows.items())]
    return "\n".join(lines)


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _torch_backends() -> tuple[bool, bool]:
    """Whether torch, which moves the tensors, has Gloo, and NCCL with a GPU."""
    if not _is_here("torch"):
        return False, False
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return False, False
    return dist.is_gloo_available(), torch.cuda.is_available() and dist.is_nccl_available()


if __name__ == "__main__":
    run_commandline()
