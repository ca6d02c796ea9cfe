"""The process groups of a layout: which ranks average gradients, hold shards, share a sample or share a layer."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tutti.config.layout import Layout


class Mesh:
    """The groups of this rank in a layout; every rank enters what makes a group, in the same order.

    Ranks are numbered by (copy, stage, part of a layer). A copy of the layers is at once (data, space), in which
    samples are shared, and (replica, shard), in which weights are.
    """

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        self.layout, self.rank, self.device = layout, rank, device
        self.data_rank = layout.data_rank(rank)

    @functools.cached_property
    def devices(self) -> DeviceMesh:
        """The mesh of all ranks for sharded weights: replicas, shards, stages and parts of a layer."""
        shape = (self.layout.copies // self.layout.shard, self.layout.shard, self.layout.stages, self.layout.tensor)
        ranks = torch.arange(self.layout.world_size).view(shape)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=("replica", "shard", "stage", "tensor"))

    @property
    def weights(self) -> DeviceMesh:
        """The ranks with the same layers: over one dimension, or over replicas and shards."""
        return self.devices["shard" if self.layout.shard == self.layout.copies else ("replica", "shard")]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that share each layer."""
        return self.devices["tensor"]

    @functools.cached_property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks with the same layers, which average their gradients; None for all ranks."""
        return self._group(self.layout.copies, self.layout.stages * self.layout.tensor)

    @functools.cached_property
    def space(self) -> dist.ProcessGroup | None:
        """The ranks that share samples in space; None for all ranks."""
        return self._group(self.layout.parts, self.layout.stages * self.layout.tensor)

    @functools.cached_property
    def neighbours(self) -> tuple[dist.ProcessGroup, list[int]]:
        """A group of its own of the ranks that share samples, for halos, and these ranks by the parts they have.

        Halos are exchanged while gradients are averaged, in an order that another group does not disturb.
        """
        layout = self.layout
        stride = layout.stages * layout.tensor
        rows = torch.arange(layout.world_size).view(-1, layout.parts, stride).transpose(1, 2).reshape(-1, layout.parts)
        own, _ = dist.new_subgroups_by_enumeration(rows.tolist())
        assert isinstance(own, dist.ProcessGroup)
        return own, dist.get_process_group_ranks(own)

    @functools.cached_property
    def stages(self) -> dist.ProcessGroup | None:
        """The ranks that hold the stages of one model; None for all ranks."""
        return self._group(self.layout.stages, self.layout.tensor)

    @functools.cached_property
    def sharing(self) -> dist.ProcessGroup | None:
        """The ranks that train on the same samples; None for all ranks."""
        return self._group(self.layout.sharing, 1)

    def _group(self, size: int, stride: int) -> dist.ProcessGroup | None:
        """The group of this rank, of `size` ranks that are `stride` apart; every rank enters."""
        world = self.layout.world_size
        if size == world:
            return None
        rows = torch.arange(world).view(-1, size, stride).transpose(1, 2).reshape(-1, size)
        own, _ = dist.new_subgroups_by_enumeration(rows.tolist())
        assert isinstance(own, dist.ProcessGroup)
        return own
