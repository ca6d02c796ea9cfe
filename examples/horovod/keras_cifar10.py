"""CIFAR-10 with a residual network in Keras 3, from a YAML file: `horovod.keras` on any of Keras' backends.

    horovodrun -np 2 python examples/horovod/keras_cifar10.py examples/horovod/keras_cifar10.yaml -d
    KERAS_BACKEND=torch tutti run -n 2 examples/horovod/keras_cifar10.py examples/horovod/keras_cifar10.yaml -d

With -d the script trains on all ranks that were started; without it, each process trains alone. Without --data it
trains on random images.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import horovod.keras as hvd
import keras
import numpy as np
import yaml

Split = tuple[np.ndarray, np.ndarray]


def load(folder: Path | None, options: dict[str, Any]) -> tuple[Split, Split]:
    """Return images in the range 0 to 1 and labels, for training and for validation."""
    if folder is not None:
        from tutti.data.cifar10 import read

        return tuple(
            (images.transpose(0, 2, 3, 1).astype("float32") / 255, labels)
            for images, labels in (map(np.asarray, read(split, folder)) for split in ("train", "valid"))
        )  # pyright: ignore[reportReturnType]
    random = np.random.default_rng(42)
    colours = random.uniform(size=[10, 1, 1, 3])
    labels = random.integers(10, size=options["train_samples"] + options["valid_samples"])
    images = (0.7 * colours[labels] + 0.3 * random.uniform(size=[len(labels), 32, 32, 3])).astype("float32")
    count = options["train_samples"]
    return (images[:count], labels[:count]), (images[count:], labels[count:])


def build_model(widths: list[int]) -> Any:
    """Build a 3x3 convolution and, for each width, a block with a projection and one without; ten outputs."""
    inputs = keras.Input([32, 32, 3])
    x = _convolve(inputs, widths[0], 3)
    for place, width in enumerate(widths):
        x = _block(x, width, stride=1 if place == 0 else 2, projects=True)
        x = _block(x, width, stride=1, projects=False)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))


def _block(x: Any, width: int, stride: int, projects: bool) -> Any:
    short = _convolve(x, width, 1, stride, activates=False) if projects else x
    x = _convolve(x, width, 1, stride)
    x = _convolve(x, width, 3)
    x = keras.layers.Add()([_convolve(x, width, 1, activates=False), short])
    return keras.layers.ReLU()(x)


def _convolve(x: Any, width: int, size: int, stride: int = 1, activates: bool = True) -> Any:
    x = keras.layers.Conv2D(width, size, stride, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization()(x)
    return keras.layers.ReLU()(x) if activates else x


class EpochTimes(keras.callbacks.Callback):
    """Records the duration of every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def main() -> None:
    parser = argparse.ArgumentParser(description="CIFAR-10 in Keras with Horovod's API, from a YAML file.")
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("-d", "--distributed", action="store_true", help="train on all ranks that were started")
    parser.add_argument("--data", type=Path, help="folder or archive of CIFAR-10")
    parser.add_argument("--epochs", type=int, help="number of epochs, instead of that in the file")
    args = parser.parse_args()
    config = yaml.safe_load(args.config.read_text())
    training, options = config["training"], config["optimizer"]

    rank, size = 0, 1
    if args.distributed:
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
    keras.utils.set_random_seed(42 + rank)

    (images, labels), valid = load(args.data, config["data"])
    mine = slice(rank, len(images) // size * size, size)
    lr = options["lr"] * (size if options["lr_scaling"] == "linear" else 1)
    optimizer = getattr(keras.optimizers, options["name"])(learning_rate=lr)

    callbacks: list[Any] = []
    if args.distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
        warm = training["warmup_epochs"]
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=lr, warmup_epochs=warm),
            *(
                hvd.callbacks.LearningRateScheduleCallback(initial_lr=lr, multiplier=factor, start_epoch=epoch)
                for epoch, factor in training["milestones"].items()
            ),
        ]
    times = EpochTimes()
    model = build_model(config["model"]["widths"])
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    if rank == 0:
        print(f"{model.count_params():,} parameters, {size} rank(s), {keras.backend.backend()} backend", flush=True)
    history = model.fit(
        images[mine],
        labels[mine],
        batch_size=training["batch_size"],
        epochs=args.epochs or training["epochs"],
        validation_data=valid,
        callbacks=[*callbacks, times],
        verbose=2 if rank == 0 else 0,
    ).history

    weights = np.concatenate([weight.reshape(1, -1) for weight in model.get_weights()], axis=1)
    same = bool(np.all(np.asarray(hvd.allgather(weights, name="weights")) == weights)) if args.distributed else True
    if rank == 0:
        print(f"best validation accuracy {max(history['val_accuracy']):.2%}, {np.mean(times.seconds):.1f} s an epoch")
        print(f"loss of the first epoch {history['loss'][0]:.4f}, of the last {history['loss'][-1]:.4f}")
        print(f"weights on {size} rank(s): {'identical' if same else 'DIFFERENT'}", flush=True)
    if not same:
        raise SystemExit("the weights of ranks differ")


if __name__ == "__main__":
    main()
