"""The layout of a run: how its ranks share samples, weights, the space of a sample and the layers of a model."""

import math
from dataclasses import dataclass, replace

from tutti.config.run import RunConfig
from tutti.config.schema import DdpConfig, ParallelConfig
from tutti.errors import ConfigError
from tutti.units import count


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism on a number of ranks; the data degree is what the others leave.

    Neighbouring ranks communicate most: the parts of a layer are innermost, then stages, then parts of a sample, and
    the ranks with different samples are outermost.
    """

    world_size: int
    shard: int = 1  # ranks that hold one copy of the weights between them
    space: tuple[int, ...] = (1,)  # parts of a sample along its first dimensions in space
    stages: int = 1  # parts of the model, one after another
    tensor: int = 1  # parts of a layer
    sequence: int = 1  # parts of a sample that is a sequence
    notes: tuple[str, ...] = ()  # what is used instead of what the recipe asks for

    @property
    def parts(self) -> int:
        """The number of ranks that each have a part of a sample."""
        return math.prod(self.space) * self.sequence

    @property
    def sharing(self) -> int:
        """The number of ranks that train on the same samples."""
        return self.parts * self.stages * self.tensor

    @property
    def data_ranks(self) -> int:
        """The number of shares into which the global batch is split."""
        return self.world_size // self.sharing

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same layers, whole or in shards, and average their gradients."""
        return self.data_ranks * self.parts

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch a rank has."""
        return rank // self.sharing

    def space_rank(self, rank: int) -> int:
        """Which part of a sample a rank has, counted with the last dimension fastest."""
        return rank // (self.stages * self.tensor) % self.parts

    def stage(self, rank: int) -> int:
        """Which part of the model a rank has."""
        return rank // self.tensor % self.stages

    def tensor_rank(self, rank: int) -> int:
        """Which part of each layer a rank has."""
        return rank % self.tensor

    def owns_samples(self, rank: int) -> bool:
        """Whether a rank is the first of those that train on the same samples."""
        return rank % self.sharing == 0

    @property
    def is_data_parallel(self) -> bool:
        """Whether ranks differ by their samples alone, and each holds all weights."""
        return self.sharing == 1 and self.shard == 1

    @property
    def splits_weights(self) -> bool:
        """Whether a rank holds parts of parameters."""
        return self.shard > 1 or self.tensor > 1

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 averages gradients: of sharded weights, and of the parts of layers, which DDP does not take."""
        return self.shard > 1 or (self.tensor > 1 and self.copies > 1)

    def line(self) -> str:
        """The layout in words, as in "8 ranks = 2 data x 4 space [2, 2]; weights sharded over 4 ranks"."""
        degrees = [f"{self.data_ranks} data"]
        if math.prod(self.space) > 1:
            degrees.append(f"{self.parts} space {list(self.space)}")
        named = (("sequence", self.sequence), ("stages", self.stages), ("tensor", self.tensor))
        degrees += [f"{each} {name}" for name, each in named if each > 1]
        line = f"{count(self.world_size, 'rank')} = {' x '.join(degrees)}"
        return f"{line}; weights sharded over {self.shard} ranks" if self.shard > 1 else line


def check_parallel(config: RunConfig) -> None:
    """Refuse settings that have no meaning together, on any number of ranks."""
    parallel, defaults = config.parallel, DdpConfig()
    degrees = {
        "space": math.prod(parallel.space_parts),
        "sequence": parallel.sequence,
        "stages": parallel.stages,
        "tensor": parallel.tensor,
    }
    used = [name for name, degree in degrees.items() if degree > 1]
    if used[:1] in (["space"], ["sequence"]) and len(used) > 1:
        raise ConfigError(
            f"parallel.{used[0]} with parallel.{used[1]}: expected one of them. Ranks share samples, or the layers of "
            f"a model. Leave parallel.{used[1]} out."
        )
    if "stages" in used and (parallel.shard != "none" or len(used) > 1):
        other = "shard" if parallel.shard != "none" else "tensor"
        raise ConfigError(
            f"parallel.stages={parallel.stages} with parallel.{other}: expected one of them. A stage holds its layers "
            f"whole. Leave parallel.{other} out, or parallel.stages."
        )
    for name in ("stages", "tensor"):
        if config.ema is not None and name in used:
            raise ConfigError(
                f"ema.decay={config.ema.decay:g} with parallel.{name}={degrees[name]}: averaged weights exist with "
                f"data parallelism and parallel.shard. Leave ema out, or parallel.{name}."
            )
    kinds = used if parallel.shard == "none" else ["shard", *used]
    if not kinds:
        return
    first = f"parallel.{kinds[0]}"
    for key in DdpConfig.model_fields:
        given = getattr(config.ddp, key)
        if given != getattr(defaults, key) and kinds not in (["space"], ["sequence"]):
            raise ConfigError(
                f"ddp.{key}={given!r} with {first}: expected no setting of DDP, which does not average these "
                f"gradients. Leave ddp.{key} out, or {first}."
            )
    if config.log.noise_scale:
        raise ConfigError(
            f"log.noise_scale=true with {first}: expected ranks that each hold the gradient of their own samples. "
            f"Set log.noise_scale=false, or leave {first} out."
        )
    if config.speed.graphs:
        raise ConfigError(
            f"speed.graphs={str(config.speed.graphs).lower()} with {first}: expected no CUDA graphs, which cannot hold "
            f"its collectives. Set speed.graphs=false, or leave {first} out."
        )


def chunks_per_rank(config: ParallelConfig) -> int:
    """The parts of the model on each rank, which a schedule of stages interleaves."""
    return 2 if config.schedule in ("interleaved", "zero_bubble") else 1


def make_layout(config: ParallelConfig, world_size: int, local_size: int | None = None) -> Layout:
    """The layout of a recipe on a number of ranks, of which `local_size` are on a host; without it, all are.

    On fewer ranks than a recipe asks for, the largest degrees that divide their number are used. Raises ConfigError
    if none does.
    """
    wished = Layout(world_size, 1, config.space_parts, config.stages, config.tensor, config.sequence)
    bare, asked, notes = wished, wished.sharing, ()
    if world_size % asked:
        wanted, bare = _degrees(wished), _reduce(wished)
        found = bare.sharing
        if world_size > asked or found == 1 < world_size:
            raise ConfigError(
                f"{wanted} on {count(world_size, 'rank')}: expected a multiple of {asked} ranks. "
                f"Start {_nearest_multiples(world_size, asked)} ranks, or change the degrees."
            )
        notes = (f"{wanted} on {count(world_size, 'rank')}: {_degrees(bare)} is used",)
    tensor = bare.tensor
    if local_size is not None and local_size < world_size and local_size % tensor:
        raise ConfigError(
            f"parallel.tensor={tensor} with {count(local_size, 'rank')} on a host: expected a divisor of {local_size}, "
            "since the ranks that share a layer are on one host. "
            f"Set parallel.tensor={math.gcd(tensor, local_size)}, or start a multiple of {tensor} ranks on each host."
        )
    shard, more = _shard(config, bare, local_size or world_size)
    return replace(bare, shard=shard, notes=(*notes, *more))


def _shard(config: ParallelConfig, layout: Layout, local_size: int) -> tuple[int, tuple[str, ...]]:
    """How many ranks hold one copy of the weights, and what to say where that is not what was asked for."""
    copies = layout.copies
    if config.shard == "none":
        return 1, ()
    if config.shard == "all":
        return copies, ()
    if config.shard == "host":
        on_host = max(1, local_size // (layout.stages * layout.tensor))
        return math.gcd(on_host, copies), ()
    shard = math.gcd(config.shard, copies)
    if copies % config.shard == 0:
        return shard, ()
    if copies > config.shard or shard == 1 < copies:
        divisors = [str(each) for each in range(2, copies + 1) if copies % each == 0]
        raise ConfigError(
            f"parallel.shard={config.shard} on {count(copies, 'rank')} with the same layers: expected a divisor of "
            f"{copies}. Set parallel.shard={' or '.join(divisors)}, or parallel.shard=all."
        )
    return shard, (f"parallel.shard={config.shard} on {count(copies, 'rank')} with the same layers: {shard} is used",)


def _reduce(wished: Layout) -> Layout:
    """The largest degrees, each a divisor of the one asked for, whose product divides the number of ranks."""
    ranks, found = wished.world_size, []
    for wanted in (wished.tensor, wished.stages, wished.sequence, *wished.space):
        found.append(math.gcd(wanted, ranks))
        ranks //= found[-1]
    tensor, stages, sequence, *space = found
    return replace(wished, space=tuple(space), stages=stages, tensor=tensor, sequence=sequence)


def _degrees(layout: Layout) -> str:
    """The degrees as keys of a recipe; those of 1 are left out, unless all are."""
    space = layout.space
    shown = space[0] if len(space) == 1 else str(list(space)).replace(" ", "")
    keys = [f"parallel.space={shown}"] if math.prod(space) > 1 else []
    for name in ("sequence", "stages", "tensor"):
        if (degree := getattr(layout, name)) > 1:
            keys.append(f"parallel.{name}={degree}")
    return " and ".join(keys) or "no split"


def _nearest_multiples(ranks: int, unit: int) -> str:
    below = ranks // unit * unit
    return " or ".join(str(each) for each in (below, below + unit) if each)
