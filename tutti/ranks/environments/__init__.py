"""Which rank this process is: one module for each launcher, and `discover`, which tries them."""

from tutti.errors import LaunchError
from tutti.ranks.environments import horovod, mpich, open_mpi, slurm, torchrun
from tutti.ranks.placement import Environment, Placement, number

# Inner launchers first. Under mpirun or torchrun in an allocation, Slurm's variables are those of the daemon.
_INNER = (torchrun, horovod, open_mpi, mpich)


def discover(env: Environment) -> Placement:
    """Return the placement of this process according to the variables of its launcher; one rank if there is none."""
    present = [reader for reader in _INNER if reader.is_present(env)]
    found = [reader.read(env).checked() for reader in present]
    for other in found[1:]:
        if not _agree(found[0], other, env):
            raise LaunchError(
                f"two launchers at once: {found[0].launcher} says rank {found[0].rank} of {found[0].world_size}, "
                f"{other.launcher} says rank {other.rank} of {other.world_size}. "
                "Start the ranks with one of them, or unset the variables of the other."
            )
    if found:
        return found[0]
    return slurm.read(env).checked() if slurm.is_present(env) else Placement(launcher="none")


def _agree(inner: Placement, outer: Placement, env: Environment) -> bool:
    """Returns whether both launchers report the same rank, or each rank of the outer one runs an agent of torchrun."""
    if (inner.rank, inner.world_size) == (outer.rank, outer.world_size):
        return True
    if inner.launcher != torchrun.NAME:
        return False
    agents = number(env, "GROUP_WORLD_SIZE", default=0)
    return (inner.node_rank, agents) == (outer.rank, outer.world_size)
