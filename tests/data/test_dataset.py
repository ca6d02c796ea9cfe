"""In-memory datasets: normalised batch by batch, shifted by the draws of each sample, never modified."""

import pytest
import torch

from tutti.data.builtin import digits, synthetic
from tutti.data.dataset import ArrayDataset, BatchDataset, MovedImages, SampleDataset
from tutti.data.order import Draws

SPLITS = ("train", "valid")


def images(samples: int = 60, channels: int = 2, height: int = 5, width: int = 7) -> torch.Tensor:
    """Bytes without a zero among them, so that what was filled in shows."""
    count = samples * channels * height * width
    return (torch.arange(count) % 255 + 1).to(torch.uint8).reshape(samples, channels, height, width)


def shifted(image: torch.Tensor, down: int, right: int, fill: float) -> torch.Tensor:
    """One image moved pixel by pixel."""
    _, height, width = image.shape
    moved = torch.full_like(image, fill, dtype=torch.float32)
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                moved[:, y, x] = image[:, y - down, x - right].float()
    return moved


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.int64])
def test_a_batch_is_normalised_and_leaves_the_samples_as_they_are(dtype: torch.dtype) -> None:
    raw = images().to(dtype)
    dataset = ArrayDataset(raw.clone(), torch.arange(60), mean=3.0, std=4.0)
    ids = torch.tensor([5, 0, 59, 5])
    for _ in range(2):
        inputs, targets = dataset.batch(ids, None)
        assert inputs.dtype == torch.float32
        torch.testing.assert_close(inputs, (raw[ids].float() - 3) / 4)
        assert targets.tolist() == [5, 0, 59, 5]


def test_a_batch_without_normalisation_is_a_copy() -> None:
    raw = torch.arange(12.0).reshape(4, 3)
    dataset = ArrayDataset(raw, torch.arange(4))
    inputs, targets = dataset.batch(torch.tensor([1, 2]), None)
    assert torch.equal(inputs, raw[1:3])
    inputs.zero_(), targets.zero_()
    assert torch.equal(dataset.batch(torch.tensor([1, 2]), None)[0], torch.arange(3.0, 9.0).reshape(2, 3))
    assert dataset.batch(torch.tensor([1, 2]), None)[1].tolist() == [1, 2]


def test_a_dataset_knows_its_length_its_shape_and_its_classes() -> None:
    dataset = ArrayDataset(images(), torch.arange(60) % 7, shift=2)
    assert (len(dataset), dataset.input_shape, dataset.num_classes) == (60, (2, 5, 7), 7)
    assert ArrayDataset(images(), torch.rand(60, 3)).num_classes is None
    assert isinstance(dataset, BatchDataset)
    assert not isinstance(dataset, SampleDataset)


@pytest.mark.parametrize("pixels", [1, 2, 4])
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (3.0, 4.0)])
def test_a_shift_moves_each_image_by_its_own_draws(pixels: int, mean: float, std: float) -> None:
    raw = images()
    dataset = ArrayDataset(raw, torch.arange(60), mean=mean, std=std, shift=pixels)
    ids = torch.tensor([59, 3, 3, *range(0, 60, 2)])
    inputs, _ = dataset.batch(ids, Draws(42, 1, ids))
    offsets = set()
    for row, sample in enumerate(ids.tolist()):
        draws = Draws(42, 1, torch.tensor([sample]))
        top, left = (int(draws.integers(0, 2 * pixels)) for _ in range(2))
        offsets.add((pixels - top, pixels - left))
        moved = shifted(raw[sample], down=pixels - top, right=pixels - left, fill=0)
        torch.testing.assert_close(inputs[row], (moved - mean) / std)
    assert len(offsets) > 4
    assert torch.equal(inputs[1], inputs[2])


def test_a_shift_reaches_every_offset_in_both_directions() -> None:
    ids = torch.arange(2000)
    spots = torch.zeros(2000, 1, 5, 5)
    spots[:, :, 2, 2] = 1
    inputs, _ = ArrayDataset(spots, ids, shift=2).batch(ids, Draws(1, 1, ids))
    places, counts = inputs.nonzero()[:, 2:].unique(dim=0, return_counts=True)
    assert places.tolist() == [[y, x] for y in range(5) for x in range(5)]
    assert counts.min() > 45 and counts.max() < 120


def test_without_draws_nothing_is_shifted() -> None:
    raw = images()
    ids = torch.tensor([4, 1, 7])
    inputs, _ = ArrayDataset(raw, torch.arange(60), mean=3.0, std=4.0, shift=2).batch(ids, None)
    torch.testing.assert_close(inputs, (raw[ids].float() - 3) / 4)


def test_a_margin_is_zero_or_the_nearest_edge() -> None:
    ids = torch.arange(200)
    image = torch.tensor([[1.0, 2], [3, 4]]).expand(200, 1, 2, 2)
    zero = {tuple(i.flatten().tolist()) for i in MovedImages(image, 1).take(ids, Draws(1, 1, ids))}
    assert zero == {
        (0, 0, 0, 1), (0, 0, 1, 2), (0, 0, 2, 0),
        (0, 1, 0, 3), (1, 2, 3, 4), (2, 0, 4, 0),
        (0, 3, 0, 0), (3, 4, 0, 0), (4, 0, 0, 0),
    }  # fmt: skip
    edge = {tuple(i.flatten().tolist()) for i in MovedImages(image.byte(), 1, fill="edge").take(ids, Draws(1, 1, ids))}
    assert edge == {
        (1, 1, 1, 1), (1, 2, 1, 2), (2, 2, 2, 2),
        (1, 1, 3, 3), (1, 2, 3, 4), (2, 2, 4, 4),
        (3, 3, 3, 3), (3, 4, 3, 4), (4, 4, 4, 4),
    }  # fmt: skip


def test_about_half_of_the_images_are_mirrored_and_others_in_each_epoch() -> None:
    raw, ids = images(), torch.arange(60)
    moved = MovedImages(raw, 0, flip=True)
    mirrored = [moved.take(ids, Draws(1, epoch, ids))[:, 0, 0, 0] != raw[:, 0, 0, 0] for epoch in (0, 1)]
    assert 18 < mirrored[0].sum() < 42
    assert not torch.equal(*mirrored)
    assert torch.equal(moved.take(ids, None), raw)


def test_alternate_mirroring_takes_the_other_half_in_every_other_epoch() -> None:
    raw, ids = images(), torch.arange(60)
    moved = MovedImages(raw, 0, flip="alternate")
    even, odd, even_again = (moved.take(ids, Draws(1, epoch, ids)) for epoch in (0, 1, 2))
    assert torch.equal(even, even_again)
    assert torch.equal(odd, even.flip(-1))
    assert 18 < (even[:, 0, 0, 0] != raw[:, 0, 0, 0]).sum() < 42


@pytest.mark.parametrize("flip", [False, True])
def test_the_gather_of_a_gpu_takes_the_same_pixels_as_windows_in_memory(flip: bool) -> None:
    moved = MovedImages(images(), 2, flip=flip, fill="reflect")
    ids = torch.tensor([5, 5, 59, 0])
    top, left = torch.tensor([0, 4, 2, 1]), torch.tensor([3, 0, 2, 4])
    mirrored = torch.tensor([True, False, True, False]) if flip else None
    assert torch.equal(moved.gather(ids, top, left, mirrored), moved.take_windows(ids, top, left, mirrored))


def test_channels_have_means_and_spreads_of_their_own() -> None:
    raw, ids = images(), torch.tensor([5, 0])
    inputs, _ = ArrayDataset(raw, torch.arange(60), mean=(3.0, 5.0), std=(4.0, 2.0)).batch(ids, None)
    expected = (raw[ids].float() - torch.tensor([3.0, 5.0]).view(2, 1, 1)) / torch.tensor([4.0, 2.0]).view(2, 1, 1)
    torch.testing.assert_close(inputs, expected)


def test_synthetic_samples_are_the_same_from_the_same_seed_and_can_be_told_apart() -> None:
    train, valid = (synthetic(split, shape=(4, 3), classes=5, train=20, valid=10, noise=0.1) for split in SPLITS)
    assert (len(train), len(valid), train.input_shape, train.num_classes) == (20, 10, (4, 3), 5)
    ids = torch.arange(10)
    (inputs, targets), (others, same) = train.batch(ids, None), valid.batch(ids, None)
    assert torch.equal(targets, same) and targets.tolist() == [0, 1, 2, 3, 4] * 2
    assert not torch.equal(inputs, others)
    distances = torch.cdist(inputs.flatten(1), others.flatten(1))
    assert torch.equal(targets[distances.argmin(1)], targets)
    assert torch.equal(synthetic("train", (4, 3), 5, 20, 10, 0.1).batch(ids, None)[0], inputs)
    assert not torch.equal(synthetic("train", (4, 3), 5, 20, 10, 0.1, seed=1).batch(ids, None)[0], inputs)


def test_the_digits_are_split_once_for_all_and_only_those_for_training_are_shifted() -> None:
    from sklearn.datasets import load_digits

    train, valid = (digits(split, shift=1) for split in SPLITS)
    assert (len(train), len(valid), train.input_shape, train.num_classes) == (1437, 360, (1, 8, 8), 10)
    kept = [dataset.batch(torch.arange(len(dataset)), None)[0] for dataset in (train, valid)]
    found = torch.cat(kept).mul(6.0).add(4.9).round().flatten(1).tolist()
    assert sorted(found) == sorted(load_digits().data.tolist())
    assert abs(kept[0].mean()) < 0.02 and abs(kept[0].std() - 1) < 0.02
    ids = torch.arange(360)
    assert torch.equal(valid.batch(ids, Draws(1, 1, ids))[0], kept[1])
    assert not torch.equal(train.batch(ids, Draws(1, 1, ids))[0], kept[0][:360])
