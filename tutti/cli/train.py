"""`tutti train` and `tutti run`: start ranks, or be one."""

import os
from pathlib import Path
from typing import Any

from tutti.checkpoint.manifest import find_latest
from tutti.cli.ranks import as_rank, finish, given_folder, is_rank, place
from tutti.config.framework import keras_backend
from tutti.config.load import Resolved, resolve
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import CheckpointError
from tutti.launch import local
from tutti.launch.fork_server import open_nursery
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.placement import Placement
from tutti.ranks.process import end_with_parent
from tutti.runs.folder import RunFolder, check_writable, create_folder, write_config
from tutti.runs.listing import find_runs, read_state


def train(recipe: str, overrides: list[str], ranks: int | None, resume: str | None, preflight: bool = False) -> None:
    """Train a recipe on ranks started here, or as one of those already started."""
    placement = place(ranks)
    make_importable(recipe)
    folder, checkpoint = None, None
    if (Path(recipe) / "config.yaml").is_file():
        folder, checkpoint = begun_run(Path(recipe), resume)
        if read_state(folder) == "finished":
            if placement.rank == 0:
                print(f"the run in {folder.path} is finished: nothing is left to do")
            return
        config = resolve(str(folder.config), overrides).config
    else:
        config = resolve(recipe, overrides).config
        if resume is not None:
            checkpoint = find_checkpoint(resume, config.out, config.recipe)
            config = _resumed(recipe, checkpoint, overrides).config
    if ranks is None or ranks == 1 or is_rank(placement):
        _train_as_rank(config, placement, folder or given_folder(), checkpoint, preflight)
        return
    open_nursery(_needs(config), threads_per_rank(ranks, os.environ, config.runtime.threads))
    check(config, ranks)
    more = []
    if checkpoint:
        folder = RunFolder(checkpoint.parent.parent)
        more = [*overrides, "--resume", str(checkpoint)]
    elif folder:
        more = [*overrides]
    else:
        check_writable(config.out)
        folder = create_folder(config.out, config.recipe, ranks)
        write_config(folder, config.as_yaml())
    more += ["--preflight"] if preflight else []
    arguments = ["-m", "tutti", "train", str(folder.config), *more]
    finish(folder, local.start_ranks(ranks, arguments, folder, config.runtime.threads, forked=True))


def run(script: str, arguments: list[str], ranks: int | None, out: str) -> None:
    """Run a script on ranks started here, or as one of those already started."""
    from tutti.horovod.script import check_script, run_script

    placement = place(ranks)
    check_script(script)
    if is_rank(placement) or ranks in (None, 1):
        folder = given_folder()
        as_rank(placement, lambda: run_script(script, arguments, placement, folder))
        return
    check_writable(out)
    folder = create_folder(out, Path(script).stem, ranks)
    failure = local.start_ranks(ranks or 1, ["-m", "tutti", "run", script, *arguments], folder)
    if failure is None:
        print(f"run folder: {folder.path}")
    finish(folder, failure)


def begun_run(path: Path, resume: str | None) -> tuple[RunFolder, Path | None]:
    """A run folder to go on in, and its newest checkpoint if it has come to one."""
    if resume is not None:
        raise CheckpointError(f"--resume {resume}: the run in {path} goes on from its newest checkpoint. Leave it out.")
    folder = RunFolder(path)
    has_saved = (folder.checkpoints / "latest").is_file()
    return folder, find_latest(folder.checkpoints) if has_saved else None


def find_checkpoint(resume: str, out: str, recipe: str) -> Path:
    """The checkpoint that `--resume` means: of the newest run, of a run folder, or itself."""
    if resume == "latest":
        for run in reversed(find_runs(Path(out), recipe)):
            in_study = run.folder.study.exists()  # its points are the study's own
            if (run.folder.checkpoints / "latest").is_file() and not in_study:
                return find_latest(run.folder.checkpoints)
        raise CheckpointError(
            f"no run of {recipe!r} in {out!r} has a checkpoint. Start one with: tutti train {recipe}, "
            "or give the path of a run folder or of a checkpoint."
        )
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"--resume {resume}: no such folder. Give a run folder or one of its checkpoints/step-*.")
    if (path / "checkpoints").is_dir():
        return find_latest(path / "checkpoints")
    if not (path.parent.parent / "config.yaml").is_file():
        raise CheckpointError(f"--resume {resume} is neither a run folder nor a checkpoint inside one.")
    return path


def _resumed(recipe: str, checkpoint: Path, overrides: list[str]) -> Resolved:
    """A run's own configuration, with new overrides; the recipe asked for must be the one it was made with."""
    asked = resolve(recipe).config.recipe
    kept = str(checkpoint.parent.parent / "config.yaml")
    own, framework = resolve(kept, overrides), resolve(kept).config.framework
    if (own.config.framework == "torch") != (framework == "torch"):
        raise CheckpointError(
            f"checkpoint {checkpoint} was made with framework={framework}, which framework={own.config.framework} "
            f"cannot read. Set framework={framework}, or leave it out."
        )
    if own.config.recipe != asked:
        raise CheckpointError(
            f"checkpoint {checkpoint} is of recipe {own.config.recipe!r} (model {own.config.model.name}), "
            f"not of {asked!r}. Resume it with: tutti train {own.config.recipe} --resume {checkpoint}"
        )
    return own


def _train_as_rank(
    config: RunConfig, placement: Placement, folder: RunFolder | None, checkpoint: Path | None, preflight: bool
) -> None:
    if given_folder():
        end_with_parent()

    def work() -> Any:
        outcome = _run_rank(config, placement, folder, checkpoint, preflight)
        if placement.rank == 0:
            from tutti.report.curves import draw_curves

            print(f"curves:     {draw_curves(outcome.folder)}\nrun folder: {outcome.folder.path}", flush=True)
        return outcome

    as_rank(placement, work)


def _needs(config: RunConfig) -> list[str]:
    """The modules that every rank of a run will import."""
    if config.framework == "torch":
        return ["tutti.train.run", "torch._dynamo"]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read by TensorFlow when it is imported
    on_tensorflow = config.framework == "tensorflow" or keras_backend(config) == "tensorflow"
    return ["torch", "tensorflow"] if on_tensorflow else ["torch"]


def check(config: RunConfig, ranks: int, here: int | None = None) -> None:
    """Refuse what is wrong before ranks are started, all on this host unless it is told how many."""
    if config.framework == "torch":
        from tutti.ranks.device import check_gpus
        from tutti.train.check import check_parts

        check_gpus(config.runtime, here or ranks)
    else:
        from tutti.frameworks.check import check_parts
    check_parts(config, ranks)


def _run_rank(
    config: RunConfig, placement: Placement, folder: RunFolder | None, checkpoint: Path | None, preflight: bool
) -> Any:
    """Train in the framework of the recipe; what the run came to."""
    if config.framework == "torch":
        from tutti.train.run import run_rank

        return run_rank(config, placement, folder, checkpoint, preflight=preflight)
    from tutti.frameworks.run import run_rank as run_in_keras

    return run_in_keras(config, placement, folder, checkpoint, preflight)
