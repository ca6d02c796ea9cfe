"""Train on MNIST with Keras' `fit` and Horovod's API: a distributed optimizer and three callbacks.

    horovodrun -np 2 python examples/horovod/tensorflow2_keras_mnist.py
    mpirun -np 2 python examples/horovod/tensorflow2_keras_mnist.py
    tutti run -n 2 examples/horovod/tensorflow2_keras_mnist.py

Without --data it trains on the small digits that come with scikit-learn, enlarged to 28 x 28 pixels.
"""

import argparse
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

Split = tuple[np.ndarray, np.ndarray]


def load(folder: Path | None) -> tuple[Split, Split]:
    """Return images and labels for training and for testing, from MNIST's four files or from scikit-learn."""
    if folder is not None:
        from tutti.data.mnist import FILES, find_file, read_idx

        splits = []
        for split in ("train", "valid"):
            images, labels = (find_file(folder, name) for name in FILES[split])
            splits.append((read_idx(images, 3)[..., np.newaxis].astype("float32") / 255, read_idx(labels, 1)))
        return splits[0], splits[1]
    from sklearn.datasets import load_digits

    digits, target = load_digits(return_X_y=True)
    small = digits.reshape(-1, 8, 8, 1).astype("float32") / 16
    images = np.pad(small.repeat(3, axis=1).repeat(3, axis=2), [(0, 0), (2, 2), (2, 2), (0, 0)])
    return (images[:1440], target[:1440]), (images[1440:], target[1440:])


def build_model() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input([28, 28, 1]),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST with Keras and Horovod's API.")
    parser.add_argument("--data", type=Path, help="folder of MNIST's four files")
    parser.add_argument("--batch-size", type=int, default=64, help="images for each rank in a step")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warmup-epochs", type=int, default=1, help="epochs of learning-rate warm-up")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one rank")
    parser.add_argument("--checkpoints", type=Path, help="folder in which rank 0 saves the model after each epoch")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: a GPU for each rank where there are any")
    args = parser.parse_args()

    hvd.init()
    if args.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    if gpus := tf.config.get_visible_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    tf.keras.utils.set_random_seed(42 + hvd.rank())  # different initial weights and dropout masks on each rank

    (images, labels), test = load(args.data)
    mine = slice(hvd.rank(), len(images) // hvd.size() * hvd.size(), hvd.size())  # the same number for each rank
    scaled_lr = args.lr * hvd.size()

    model = build_model()
    model.compile(
        optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.Adam(scaled_lr)),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=args.warmup_epochs),
    ]
    if hvd.rank() == 0 and args.checkpoints is not None:
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(str(args.checkpoints / "mnist-{epoch}.keras")))
    history = model.fit(
        images[mine],
        labels[mine],
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=test,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )

    weights = np.concatenate([weight.reshape(1, -1) for weight in model.get_weights()], axis=1)
    same = bool(np.all(np.asarray(hvd.allgather(weights, name="weights")) == weights))
    if hvd.rank() == 0:
        losses = history.history["loss"]
        print(f"loss of the first epoch {losses[0]:.4f}, of the last {losses[-1]:.4f}")
        print(f"accuracy on {len(test[0]):,} images: {history.history['val_accuracy'][-1]:.2%}")
        print(f"weights on {hvd.size()} rank(s): {'identical' if same else 'DIFFERENT'}", flush=True)
    if not same:
        raise SystemExit("the weights of ranks differ")


if __name__ == "__main__":
    main()
