"""`tutti plan`: the memory of a rank before a run, whether it fits, and what to set where it does not."""

import functools
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti import units
from tutti.cli.options import Overrides, Recipe, examples
from tutti.config.load import resolve
from tutti.config.plan import make_plan
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.launch.local import check_ranks

if TYPE_CHECKING:
    from tutti.memory.advice import MemoryPlan

_LEAST_MEMORY = 1 << 20

app = typer.Typer()


@app.command(
    epilog=examples(
        "tutti plan nbody -n 4 --memory 40GB",
        "tutti plan nbody -n 4 --memory 40GB data.crop=256 batch.global=16 parallel.recompute=layers",
        "tutti plan digits runtime.device=cpu --json",
    )
)
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Ranks of the run; none is started.")] = 1,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of each rank's device, such as 40GB or 24GiB.", show_default="of the device here"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict the memory of a rank without a GPU: what it is used for, whether it fits, and what to set if not."""
    check_ranks(ranks)
    given = None if memory is None else _read_memory(memory)
    make_importable(recipe)
    config = resolve(recipe, overrides or []).config
    from tutti.memory.advice import make_memory_plan
    from tutti.train.memory import device_memory

    device = "cpu" if config.runtime.device == "cpu" else "cuda"
    found = make_memory_plan(
        lambda more: resolve(recipe, [*(overrides or []), *more]).config,
        ranks,
        device,
        device_memory(device, ranks) if given is None else given,
        functools.partial(device_memory, device) if given is None else None,
    )
    if as_json:
        print(json.dumps(_content(found), indent=2))
    else:
        _print(config, found, memory)


def _read_memory(text: str) -> int:
    try:
        memory = units.parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--memory {error}") from None
    if memory < _LEAST_MEMORY:
        raise ConfigError(f"--memory {text}: expected at least 1 MiB. Give the memory of a rank's device, as in 40GB.")
    return memory


def _content(found: "MemoryPlan") -> dict[str, Any]:
    from tutti.memory.advice import needed_bytes

    def needed(prediction: Any) -> list[int] | None:
        return None if prediction is None else list(needed_bytes(prediction))

    content: dict[str, Any] = asdict(found) | {"needed_bytes": needed(found.prediction)}
    trials = zip(content["trials"], found.trials, strict=True)
    content["trials"] = [each | {"needed_bytes": needed(trial.prediction)} for each, trial in trials]
    return content


def _print(config: RunConfig, found: "MemoryPlan", given: str | None) -> None:
    from tutti.memory.advice import describe, needed_bytes

    prediction = found.prediction
    passes = prediction.per_rank_batch // prediction.micro_batch
    how = f"{passes} passes of {prediction.micro_batch}" if passes > 1 else "one pass"
    layout = make_plan(config, prediction.ranks, 1 << 40).layout
    where = "a GPU" if prediction.device == "cuda" else "the CPU"
    print(
        f"{config.recipe}: {config.model.name}, {config.precision}, on {where}; {layout.line()}; "
        f"{units.count(prediction.per_rank_batch, 'sample')} a rank in {how}"
    )
    kinds = [(kind, size) for kind, size in prediction.kinds.items() if size]
    rows = [(kind, units.size(size), units.percent(size / prediction.peak_bytes)) for kind, size in kinds]
    rows.append(("peak of a rank", units.size(prediction.peak_bytes), f"in {prediction.phase}"))
    rows.append(("between steps", units.size(prediction.between_bytes), ""))
    least, most = needed_bytes(prediction)
    rows.append(("needed in all", units.size(most), f"{units.size(least)} at least"))
    units.print_table(("memory of a rank", "size", "share"), rows, left=("memory of a rank", "share"))
    for line in (*layout.notes, *prediction.notes):
        print(f"note: {line}")
    for line in _verdict(found, given) + describe(found, units.size):
        print(line)


def _verdict(found: "MemoryPlan", given: str | None) -> list[str]:
    if found.memory_bytes is None:
        return ["there is no GPU here: give the memory of one, as in --memory 40GB, to learn whether this fits"]
    memory = units.size(found.memory_bytes)
    lines = [f"{found.verdict} in {f'{given} ({memory})' if given else f'{memory}, the memory of the device here'}"]
    if found.largest_micro is not None:
        whole = found.prediction.per_rank_batch
        more = f", with batch.per_rank={found.largest_micro}" if found.largest_micro > whole else ""
        lines.append(f"the largest batch.micro that fits: {found.largest_micro}{more}")
    return lines
