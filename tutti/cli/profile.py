"""`tutti profile`: trace steps of a recipe on every rank, or the operations of a script that uses Horovod's API."""

import os

from tutti.bench.trace.steps import DEFAULT_STEPS, Asked, parse_steps
from tutti.cli.ranks import is_rank, on_ranks, place
from tutti.config.load import resolve
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder


def profile(
    recipe: str, overrides: list[str], ranks: int | None, steps: str | None, memory: bool, stacks: bool
) -> None:
    """Trace a recipe or a script, on ranks started here or as one of those already started."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read with torch: what its profiler says of itself
    if recipe.endswith(".py"):
        from tutti.cli.profile_script import profile_script

        _refuse_for_scripts(steps, memory, stacks)
        profile_script(recipe, overrides, ranks)
        return
    asked = Asked(*parse_steps(DEFAULT_STEPS if steps is None else steps), memory, stacks)
    make_importable(recipe)
    config = resolve(recipe, overrides).config
    _check_framework(config, ["tutti train", recipe, *overrides], asked)
    if not is_rank(place(ranks)):
        _check_end(config, ranks or 1, asked)

    def work(placement: Placement, folder: RunFolder | None) -> None:
        from tutti.bench.trace.profile import profile_rank

        profile_rank(config, asked, placement, folder)

    on_ranks("profile", config, ranks, ["tutti.bench.trace.profile"], work)


def _check_framework(config: RunConfig, words: list[str], asked: Asked) -> None:
    if config.framework != "torch":
        raise ConfigError(
            f"framework={config.framework}: tutti profile traces torch. TensorFlow's own profiler traces these steps "
            f"with: {' '.join(words)} log.profile=[{asked.first},{asked.last}]"
        )


def _check_end(config: RunConfig, ranks: int, asked: Asked) -> None:
    """Refuse steps beyond the end where the number of samples is known before anything starts."""
    from tutti.config.plan import make_plan

    samples = config.data.train_samples()
    if samples is not None:
        asked.check_end(make_plan(config, ranks, samples).total_steps)


def _refuse_for_scripts(steps: str | None, memory: bool, stacks: bool) -> None:
    given = [name for name, value in (("--steps", steps), ("--memory", memory), ("--stacks", stacks)) if value]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: for a recipe. A script has the timeline of all its operations: leave it out."
        )
