"""The predicted memory of a rank is that of its parameters, gradients, optimizer, batch and activations."""

from typing import Any

import pytest
import torch

from tutti.config.load import resolve_values
from tutti.config.run import RunConfig
from tutti.data.builtin import digits, synthetic
from tutti.data.nbody.dataset import nbody
from tutti.errors import ConfigError
from tutti.memory.prediction import predict, predict_pass
from tutti.memory.rank import Prediction, convolution_workspace
from tutti.memory.samples import describe_samples
from tutti.memory.tracking import ACTIVATIONS, BATCH, BUFFERS, GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS
from tutti.models.unet3d import UNet3d

PARAMETERS_OF_MLP = 4 * (1024 * 1024 + 1024 * 512 + 512 * 512 + 1024 + 512 + 512)  # bytes


def configure(**more: Any) -> RunConfig:
    values: dict[str, Any] = {
        "data": {"name": "synthetic", "shape": [4, 16, 16], "classes": 512, "train": 4096, "prefetch": 0},
        "model": {"name": "mlp", "hidden": [1024, 512]},
        "optim": {"name": "adam", "lr": 0.1},
        "batch": {"global": 64},
        "epochs": 1,
    }
    return resolve_values(values | more)


def predict_on_cpu(ranks: int = 1, **more: Any) -> Prediction:
    return predict(configure(**more), ranks, "cpu")


def test_states_of_adam_are_twice_the_parameters() -> None:
    found = predict_on_cpu()
    assert found.kinds[PARAMETERS] == PARAMETERS_OF_MLP
    assert found.kinds[OPTIMIZER] == pytest.approx(2 * PARAMETERS_OF_MLP, rel=1e-3)  # and the numbers of steps
    assert found.kinds[BATCH] == 64 * (1024 * 4 + 8)
    assert found.between_bytes == pytest.approx(3 * PARAMETERS_OF_MLP + found.kinds[BATCH], rel=1e-3)
    assert found.peak_bytes == sum(found.kinds.values())
    assert found.phase == "optimizer" or found.phase == "backward"
    assert found.peak_bytes >= 4 * PARAMETERS_OF_MLP


@pytest.mark.parametrize(
    ("name", "states"), [("sgd", 0), ("adamw", 2), ("lars", 1), ("lamb", 2), ("muon", 1)], ids=lambda value: str(value)
)
def test_every_optimizer_can_be_predicted(name: str, states: int) -> None:
    found = predict_on_cpu(optim={"name": name, "lr": 0.1})
    assert found.kinds[OPTIMIZER] == pytest.approx(states * PARAMETERS_OF_MLP, rel=1e-3)


def test_muon_and_another_optimizer_have_one_and_two_states() -> None:
    more: dict[str, Any] = {"model": {"name": "mlp", "hidden": [1024, 1024]}}
    optim = {"name": "muon", "lr": 0.1, "others": {"name": "adamw", "lr": 0.1}}
    whole = predict_on_cpu(**more, optim=optim)
    hidden = 4 * 1024**2
    expected = 2 * whole.kinds[PARAMETERS] - hidden
    assert whole.kinds[OPTIMIZER] == pytest.approx(expected, rel=1e-3)
    assert whole.peak_bytes > predict_on_cpu(**more, optim=optim | {"others": None}).between_bytes + 2 * hidden
    parts = predict_on_cpu(ranks=4, **more, optim=optim, parallel={"shard": "all"})
    assert parts.kinds[OPTIMIZER] == pytest.approx(expected / 4, rel=1e-2)
    assert parts.peak_bytes > parts.between_bytes + 2 * hidden, "a matrix is whole while it is orthogonalised"


def test_averaged_weights_are_counted_between_steps_and_twice_in_validation() -> None:
    plain = predict_on_cpu(optim={"name": "sgd", "lr": 0.1})
    found = predict_on_cpu(optim={"name": "sgd", "lr": 0.1}, ema={"decay": 0.99})
    assert found.between_bytes == plain.between_bytes + PARAMETERS_OF_MLP
    # A step has weights, averages and gradients; validation has weights, averages and the weights kept aside.
    assert found.phase in ("backward", "optimizer", "validation")
    assert found.peak_bytes == pytest.approx(plain.peak_bytes + PARAMETERS_OF_MLP, rel=0.02)
    parts = predict_on_cpu(ranks=4, ema={"decay": 0.99}, parallel={"shard": "all"})
    whole = predict_on_cpu(ranks=4, parallel={"shard": "all"})
    assert parts.between_bytes == pytest.approx(whole.between_bytes + PARAMETERS_OF_MLP / 4, rel=1e-2)


def test_data_parallel_ranks_keep_the_buckets_of_gradients() -> None:
    found = predict_on_cpu(ranks=4)
    assert (found.micro_batch, found.ranks) == (16, 4)
    assert found.kinds[GRADIENTS] == PARAMETERS_OF_MLP
    assert found.between_bytes == pytest.approx(4 * PARAMETERS_OF_MLP, rel=0.02)


def test_sharded_ranks_hold_a_part_of_weights_and_states() -> None:
    found = predict_on_cpu(ranks=4, parallel={"shard": "all"})
    assert found.kinds[PARAMETERS] == pytest.approx(PARAMETERS_OF_MLP / 4, rel=1e-2)
    assert found.kinds[OPTIMIZER] == pytest.approx(PARAMETERS_OF_MLP / 2, rel=1e-2)
    assert found.kinds[GATHERED] > 0
    assert found.between_bytes == pytest.approx(3 * PARAMETERS_OF_MLP / 4, rel=0.05)
    assert found.peak_bytes < predict_on_cpu(ranks=4).peak_bytes


def test_activations_grow_with_the_micro_batch_and_shrink_with_precision() -> None:
    many = {"data": {"name": "synthetic", "shape": [3, 32, 32], "prefetch": 0}, "model": {"name": "small_cnn"}}
    whole = predict_on_cpu(**many)
    part = predict_on_cpu(**many, batch={"global": 64, "micro": 16})
    assert part.kinds[ACTIVATIONS] == pytest.approx(whole.kinds[ACTIVATIONS] / 4, rel=0.05)
    assert part.kinds[BATCH] == whole.kinds[BATCH]
    assert whole.kinds[BUFFERS] > 0
    half = predict_on_cpu(**many, precision="bf16")
    assert half.kinds[ACTIVATIONS] < 0.7 * whole.kinds[ACTIVATIONS]


def test_recomputed_layers_keep_less() -> None:
    volumes = {"data": {"name": "nbody", "crop": 32}, "loss": {"name": "l1"}, "metrics": [], "batch": {"global": 8}}
    volumes |= {"model": {"name": "unet3d", "width": 8, "depth": 3}}
    kept = predict_on_cpu(**volumes)
    again = predict_on_cpu(**volumes, parallel={"recompute": "layers"})
    assert again.peak_bytes < kept.peak_bytes


def test_batches_that_are_loaded_ahead_are_counted() -> None:
    data = {"name": "synthetic", "shape": [4, 16, 16], "classes": 512, "train": 4096, "prefetch": 2}
    assert predict_on_cpu(data=data).kinds[BATCH] == 4 * predict_on_cpu().kinds[BATCH]


def test_a_larger_batch_of_validation_is_counted() -> None:
    many = {"data": {"name": "synthetic", "shape": [3, 32, 32], "prefetch": 0}, "model": {"name": "small_cnn"}}
    found = predict_on_cpu(**many, batch={"global": 8, "eval": 1024})
    assert found.phase == "validation"


def test_convolutions_have_a_workspace() -> None:
    volume, weight = torch.empty(2, 4, 8, 8, 8), torch.empty(16, 4, 3, 3, 3)
    out = torch.empty(2, 16, 8, 8, 8)
    assert convolution_workspace([volume, weight, out]) == volume.nbytes + weight.nbytes + out.nbytes
    half = volume.bfloat16()
    assert convolution_workspace([half, weight, out]) == 0
    assert convolution_workspace([out.bfloat16(), half, weight, half, weight]) == 8 * weight.numel()


@pytest.mark.parametrize(
    ("section", "dataset"),
    [
        ({"name": "digits"}, lambda: digits("train")),
        ({"name": "synthetic", "shape": [2, 5]}, lambda: synthetic("train", (2, 5))),
        ({"name": "nbody", "crop": 16}, lambda: nbody("train", source="synthetic", crop=16, box=16)),
    ],
    ids=["digits", "synthetic", "nbody"],
)
def test_shapes_from_options_are_those_of_the_dataset(section: dict[str, Any], dataset: Any) -> None:
    told, opened = describe_samples(configure(data=section)), dataset()
    inputs, targets = opened.batch(torch.arange(1), None)
    assert (told.inputs.shape, told.inputs.dtype) == (inputs.shape, inputs.dtype)
    assert (told.targets.shape, told.targets.dtype) == (targets.shape, targets.dtype)
    assert told.shapes["input_shape"] == opened.input_shape
    assert told.shapes.get("num_classes") == opened.num_classes


def test_a_dataset_of_the_user_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe_samples(configure(data={"name": "tutti.data.builtin:synthetic", "shape": [3, 8, 8], "train": 40}))
    assert tuple(found.inputs.shape) == (1, 3, 8, 8)
    assert found.count == 40


def test_other_frameworks_are_refused() -> None:
    config = configure(framework="keras", optim={"name": "sgd", "lr": 0.1})
    with pytest.raises(ConfigError, match="framework=keras: expected torch"):
        predict(config, 1, "cpu")


def test_nothing_is_left_of_a_prediction() -> None:
    state, resize = torch.get_rng_state(), torch.UntypedStorage.resize_
    predict_on_cpu(ranks=2, parallel={"shard": "all"})
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.UntypedStorage.resize_ is resize
    assert not torch.distributed.is_initialized()


VOLUMES: dict[str, Any] = {
    "data": {"name": "nbody", "source": "synthetic", "crop": 32, "box": 32},
    "model": {"name": "unet3d", "width": 8, "depth": 3},
    "loss": {"name": "l1"},
    "metrics": [],
    "batch": {"global": 8},
}


@pytest.mark.parametrize(
    ("ranks", "space", "recompute", "shard"),
    [(2, 2, "none", "none"), (4, [2, 2], "none", "none"), (4, 2, "layers", "none"), (4, 2, "none", "all")],
    ids=["2", "[2,2]", "computed again", "sharded"],
)
def test_a_rank_of_a_sample_that_is_split_has_its_part_of_it(
    ranks: int, space: int | list[int], recompute: str, shard: str
) -> None:
    parallel = {"recompute": recompute, "shard": shard}
    whole = predict_on_cpu(1, **VOLUMES | {"batch": {"global": 4, "micro": 2}}, parallel=parallel)
    parts = space if isinstance(space, int) else 4
    batch = {"global": 4 * ranks // parts, "micro": 2}
    found = predict_on_cpu(ranks, **VOLUMES | {"batch": batch}, parallel={"space": space, **parallel})
    assert found.kinds[BATCH] == whole.kinds[BATCH] // parts
    assert found.kinds[ACTIVATIONS] < 0.8 * whole.kinds[ACTIVATIONS]
    assert found.micro_batch == 2


def test_metrics_of_samples_in_parts_need_them_whole() -> None:
    plain = VOLUMES | {"parallel": {"space": 2}}
    found = predict_on_cpu(2, **plain | {"model": {"name": "unet3d", "width": 1, "depth": 2}})
    measured = predict_on_cpu(
        2, **plain | {"model": {"name": "unet3d", "width": 1, "depth": 2}, "metrics": ["torch.nn.functional:mse_loss"]}
    )
    assert measured.phase == "metrics"
    assert measured.peak_bytes > found.peak_bytes


def test_models_that_cannot_be_split_in_space_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"flatten .* needs the whole sample"):
        predict_on_cpu(2, parallel={"space": 2})
    with pytest.raises(ConfigError, match="16 cells do not split into 3 equal parts"):
        predict_on_cpu(3, batch={"global": 3}, parallel={"space": 3})


def test_kept_boxes_and_blocks_of_crops_are_counted_on_a_cpu_alone() -> None:
    config = configure(**VOLUMES)
    assert predict(config, 1, "cpu").kinds["data"] > 2 * 9 * 4 * 32**3
    assert predict(config, 1, "cuda").kinds["data"] == 0


def test_parts_of_layers_are_not_predicted() -> None:
    for name in ("tensor", "sequence"):
        with pytest.raises(ConfigError, match=f"parallel.{name}=2 is not predicted: expected ranks with whole layers"):
            predict(configure(parallel={name: 2}), 2, "cpu")


@pytest.mark.parametrize(
    ("precision", "device", "lays_out", "peak"),
    [
        # In the last layer: inputs of 4 channels, two volumes of 8 channels and half the side, once more side by side,
        # and outputs of 5 channels before and after tanh.
        ("fp32", "cpu", False, 4 * 32**3 * (4 + 2 * 16 / 8 + 2 * 5)),
        ("fp32", "cuda", True, 4 * 32**3 * (4 + 2 * 16 / 8 + 2 * 5)),
        ("fp32", "cuda", False, None),  # and copies in the layout of the kernels
        ("bf16", "cuda", True, None),
    ],
)
def test_a_pass_without_gradients_keeps_what_later_layers_need(
    precision: str, device: str, lays_out: bool, peak: float | None
) -> None:
    found = predict_pass(lambda: UNet3d(width=8, depth=2), (1, 4, 32, 32, 32), precision, device, lays_out)
    assert found.most_elements == 5 * 32**3
    if peak is not None:
        assert found.peak_bytes == pytest.approx(peak, rel=0.01)
    twice = predict_pass(lambda: UNet3d(width=8, depth=2), (1, 4, 64, 32, 32), precision, device, lays_out)
    assert twice.peak_bytes == pytest.approx(2 * found.peak_bytes, rel=0.01)
