"""Train on MNIST with TensorFlow 2 and Horovod's API: a custom training step with gradients averaged over ranks.

    horovodrun -np 2 python examples/horovod/tensorflow2_mnist.py
    mpirun -np 2 python examples/horovod/tensorflow2_mnist.py
    tutti run -n 2 examples/horovod/tensorflow2_mnist.py

Without --data it trains on the small digits that come with scikit-learn, enlarged to 28 x 28 pixels.
"""

import argparse
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf


def load(folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return training images and labels, from MNIST's files or from scikit-learn."""
    if folder is not None:
        from tutti.data.mnist import FILES, find_file, read_idx

        images, labels = (find_file(folder, name) for name in FILES["train"])
        return read_idx(images, 3)[..., np.newaxis].astype("float32") / 255, read_idx(labels, 1).astype("int64")
    from sklearn.datasets import load_digits

    digits, target = load_digits(return_X_y=True)
    small = digits.reshape(-1, 8, 8, 1).astype("float32") / 16
    return np.pad(small.repeat(3, axis=1).repeat(3, axis=2), [(0, 0), (2, 2), (2, 2), (0, 0)]), target.astype("int64")


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
            layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST with TensorFlow 2 and Horovod's API.")
    parser.add_argument("--data", type=Path, help="folder of MNIST's four files")
    parser.add_argument("--batch-size", type=int, default=64, help="images for each rank in a step")
    parser.add_argument("--steps", type=int, default=400, help="total number of steps, divided among the ranks")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one rank")
    parser.add_argument("--checkpoints", type=Path, help="folder in which rank 0 saves the weights at the end")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: a GPU for each rank where there are any")
    args = parser.parse_args()

    hvd.init()
    if args.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    for gpu in tf.config.get_visible_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus := tf.config.get_visible_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    images, labels = load(args.data)
    mine = slice(hvd.rank(), None, hvd.size())
    data = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine]))
    data = data.repeat().shuffle(10_000, seed=hvd.rank()).batch(args.batch_size)

    model = build_model()
    compute_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(args.lr * hvd.size())

    @tf.function
    def training_step(images: Any, labels: Any, is_first: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = compute_loss(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if is_first:  # after the first step, in which the optimizer has created its variables
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    steps = max(args.steps // hvd.size(), 2)
    losses = []
    for step, (batch, target) in enumerate(data.take(steps)):
        losses.append(training_step(batch, target, step == 0))
        if hvd.rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f"step {step + 1}/{steps}  loss {losses[-1]:.4f}", flush=True)

    tenth = max(steps // 10, 1)
    first, last = (float(hvd.allreduce(tf.reduce_mean(part))) for part in (losses[:tenth], losses[-tenth:]))
    weights = tf.concat([tf.reshape(weight, [1, -1]) for weight in model.get_weights()], 1)
    same = bool(tf.reduce_all(hvd.allgather(weights, name="weights") == weights))
    if hvd.rank() == 0:
        print(f"mean loss of the first tenth {first:.4f}, of the last {last:.4f}")
        print(f"weights on {hvd.size()} rank(s): {'identical' if same else 'DIFFERENT'}", flush=True)
        if args.checkpoints is not None:
            args.checkpoints.mkdir(parents=True, exist_ok=True)
            model.save_weights(args.checkpoints / "mnist.weights.h5")
    if not same:
        raise SystemExit("the weights of ranks differ")


if __name__ == "__main__":
    main()
