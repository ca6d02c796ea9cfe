"""The tracker counts each storage once, from its allocation to its release, and finds the peak."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tutti.memory.tracking import (
    ACTIVATIONS,
    GRADIENTS,
    PARAMETERS,
    TEMPORARIES,
    MemoryTracker,
    fake_ranks,
    make_fake_mode,
)

MIB = 1 << 20


def tensor_of(mib: int) -> torch.Tensor:
    return torch.empty(mib, MIB // 4)


def live(tracker: MemoryTracker) -> float:
    return sum(tracker.now().values()) / MIB


def test_views_and_results_in_place_allocate_nothing() -> None:
    with make_fake_mode(), MemoryTracker() as tracker:
        first = tensor_of(4)
        view = first.view(-1)[: MIB // 2].t()
        first.add_(1).relu_()
        assert live(tracker) == 4
        other = first + 1
        assert live(tracker) == 8
        del first
        assert live(tracker) == 8  # its memory is that of the view
        del view
        assert live(tracker) == 4
        del other
        assert live(tracker) == 0


def test_small_tensors_take_a_whole_unit_of_the_allocator() -> None:
    with make_fake_mode(), MemoryTracker() as tracker:
        kept = [torch.empty(1) for _ in range(3)]
        assert sum(tracker.now().values()) == 3 * 512
    del kept


def test_activations_stay_until_backward() -> None:
    with make_fake_mode(), MemoryTracker() as tracker:
        weight = nn.Parameter(torch.empty(256, 256))
        tracker.mark([weight], PARAMETERS)
        tracker.restart()
        tracker.begin("forward", ACTIVATIONS)
        loss = torch.tanh(torch.tanh(tensor_of(1).view(1024, 256) @ weight)).sum()
        assert tracker.now()[ACTIVATIONS] == 3 * MIB + 512  # the input, two results, the loss
        tracker.begin("backward", TEMPORARIES)
        loss.backward()
        tracker.mark([weight.grad], GRADIENTS)
        assert tracker.now()[ACTIVATIONS] == 512
        peak = tracker.peak()
        assert peak.phase == "backward"
        assert peak.kinds[PARAMETERS] == MIB // 4
        assert peak.num_bytes == sum(peak.kinds.values())


def test_a_storage_that_is_resized_is_counted_with_its_new_size() -> None:
    with make_fake_mode(), MemoryTracker() as tracker:
        gathered = tensor_of(4)
        gathered.untyped_storage().resize_(0)
        assert live(tracker) == 0
        gathered.untyped_storage().resize_(2 * MIB)
        assert live(tracker) == 2
        assert tracker.peak().num_bytes == 4 * MIB
    assert gathered.untyped_storage().resize_(0) is not None


def test_fake_tensors_take_what_real_ones_take() -> None:
    def peak_of_a_step() -> tuple[int, str]:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
        with MemoryTracker() as tracker:
            tracker.mark(model.parameters(), PARAMETERS)
            tracker.begin("forward", ACTIVATIONS)
            outputs = model(torch.zeros(16, 3, 8, 8))
            tracker.begin("backward", TEMPORARIES)
            outputs.square().mean().backward()
        return tracker.peak().num_bytes, tracker.peak().phase

    real = peak_of_a_step()
    with make_fake_mode():
        assert peak_of_a_step() == real


def test_an_operator_on_shards_takes_the_memory_of_shards() -> None:
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        with make_fake_mode(), MemoryTracker() as tracker:
            shards = [DTensor.from_local(tensor_of(4), mesh, [Shard(0)]) for _ in range(2)]
            tracker.restart()
            tracker.begin("forward", ACTIVATIONS)
            kept = shards[0].softmax(1) * torch.tanh(shards[1])
            assert live(tracker) == 12
            assert tracker.peak().num_bytes == 20 * MIB  # and never a whole tensor, of which the shapes are found
    del kept
