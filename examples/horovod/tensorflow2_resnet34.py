"""Train ResNet-34 with TensorFlow 2 and Horovod's API, and measure images per second.

    horovodrun -np 2 python examples/horovod/tensorflow2_resnet34.py
    mpirun -np 4 python examples/horovod/tensorflow2_resnet34.py --data imagenet --image-size 224 --batch-size 64
    srun -n 8 python examples/horovod/tensorflow2_resnet34.py --image-size 224 --batch-size 64 --steps 10

Without --data it trains on small generated images. The comments count the eight steps that make a script distributed.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

layers = tf.keras.layers
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}  # residual blocks of each stage


def build_resnet(depth: int, image_size: int, classes: int) -> Any:
    """Build a residual network of basic blocks: 7x7 convolution, max-pool, four stages, mean, dense layer."""
    inputs = tf.keras.Input([image_size, image_size, 3])
    x = convolve(inputs, 64, 7, 2)
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, count in enumerate(BLOCKS[depth]):
        for block in range(count):
            x = basic_block(x, 64 * 2**stage, stride=2 if stage > 0 and block == 0 else 1)
    x = layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(inputs, layers.Dense(classes)(x))


def basic_block(x: Any, width: int, stride: int) -> Any:
    shortcut = x if stride == 1 and x.shape[-1] == width else convolve(x, width, 1, stride, activates=False)
    x = convolve(convolve(x, width, 3, stride), width, 3, activates=False, scale="zeros")  # begins as the identity
    return layers.ReLU()(layers.Add()([x, shortcut]))


def convolve(x: Any, width: int, size: int, stride: int = 1, activates: bool = True, scale: str = "ones") -> Any:
    x = layers.Conv2D(width, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
    x = layers.BatchNormalization(gamma_initializer=scale)(x)
    return layers.ReLU()(x) if activates else x


def find_images(folder: Path, classes: int) -> list[tuple[str, int]]:
    """Return the files and labels of the images in train/CLASS/ of a folder, in one random order for all ranks."""
    names = sorted(path.name for path in (folder / "train").glob("*") if path.is_dir())[:classes]
    found = [
        (str(path), label)
        for label, name in enumerate(names)
        for path in sorted((folder / "train" / name).iterdir())
        if path.suffix.lower() in (".jpg", ".jpeg", ".png")
    ]
    return [found[place] for place in np.random.default_rng(0).permutation(len(found))]


def generate(count: int, image_size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random images; each class has a colour."""
    random = np.random.default_rng(0)
    labels = random.integers(classes, size=count)
    colours = random.uniform(size=[classes, 1, 1, 3])
    noise = random.uniform(size=[count, image_size, image_size, 3])
    return (255 * (0.7 * colours[labels] + 0.3 * noise)).astype("uint8"), labels


def open_data(args: argparse.Namespace) -> Any:
    """Return batches of this rank's images and labels, without an end."""

    def decode(path: Any, label: Any) -> tuple[Any, Any]:
        image = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
        return tf.image.resize(image, [args.image_size] * 2), label

    def normalise(image: Any, label: Any) -> tuple[Any, Any]:
        return tf.cast(image, tf.float32) / 127.5 - 1, label

    if args.files:
        source = tuple(map(list, zip(*args.files, strict=True)))
    else:
        source = generate(args.samples, args.image_size, args.classes)
    data = tf.data.Dataset.from_tensor_slices(source)
    data = data.shard(num_shards=hvd.size(), index=hvd.rank())  # step 3: every size-th sample, beginning with rank
    data = data.repeat().shuffle(1_000, seed=hvd.rank())
    if args.files:
        data = data.map(decode, num_parallel_calls=args.readers)
    return data.map(normalise, num_parallel_calls=args.readers).batch(args.batch_size).prefetch(args.prefetch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="ResNet-34 with TensorFlow 2 and Horovod's API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="folder with train/CLASS/*.jpg; default: generated images")
    parser.add_argument("--samples", type=int, default=256, help="number of generated images")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--image-size", type=int, default=32, help="pixels on a side")
    parser.add_argument("--batch-size", type=int, default=8, help="images for each rank in a step")
    parser.add_argument("--steps", type=int, default=10, help="measured steps, after the first one")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of one rank")
    parser.add_argument("--depth", type=int, choices=BLOCKS, default=34, help="layers of the network")
    parser.add_argument("--readers", type=int, default=2, help="images that are read and decoded at once")
    parser.add_argument("--prefetch", type=int, default=2, help="batches that are prepared ahead")
    parser.add_argument("--threads", type=int, default=0, help="threads of an operation; 0 leaves it to TensorFlow")
    parser.add_argument("--profile", type=Path, help="folder for a profile of rank 0, for TensorBoard")
    parser.add_argument("--checkpoints", type=Path, help="folder in which rank 0 saves the weights at the end")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: a GPU for each rank where there are any")
    args = parser.parse_args()
    args.files = find_images(args.data, args.classes) if args.data else []
    if args.data and not args.files:
        parser.error(f"--data {args.data}: expected images in {args.data}/train/CLASS/, found none")

    hvd.init()  # step 1: join the ranks that the launcher has started

    # Step 2: one GPU for each rank.
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    gpus = [] if args.device == "cpu" else tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[hvd.local_rank()] if gpus else [], "GPU")
    for gpu in tf.config.get_visible_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)

    data = open_data(args)
    model = build_resnet(args.depth, args.image_size, args.classes)
    compute_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)  # step 4: a rate for the global batch

    @tf.function
    def training_step(images: Any, labels: Any, is_first: bool) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            loss = compute_loss(labels, outputs)
        tape = hvd.DistributedGradientTape(tape)  # step 5: gradients averaged over ranks
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if is_first:  # step 6: rank 0's variables for all, after the step in which the optimizer has created its own
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        correct = tf.equal(tf.argmax(outputs, 1), tf.cast(labels, tf.int64))
        return loss, tf.reduce_mean(tf.cast(correct, tf.float32))

    rates: list[float] = []
    figures: list[Any] = []
    profiles = args.profile is not None and hvd.rank() == 0
    for step, (images, labels) in enumerate(data.take(args.steps + 2)):
        # The first two steps have a graph each: one with the broadcast, one without.
        if step == 2 and profiles:
            tf.profiler.experimental.start(str(args.profile))
        began = time.perf_counter()
        loss, accuracy = training_step(images, labels, step == 0)
        figures.append((float(loss), float(accuracy)))  # waits for the end of the step
        if step >= 2:
            rates.append(hvd.size() * args.batch_size / (time.perf_counter() - began))
    if profiles:
        tf.profiler.experimental.stop()

    # Step 8: figures averaged over ranks.
    first, last, accuracy = (
        float(hvd.allreduce(tf.constant(value), name=name))
        for name, value in (("first", figures[0][0]), ("last", figures[-1][0]), ("accuracy", figures[-1][1]))
    )
    weights = tf.concat([tf.reshape(each, [1, -1]) for each in model.trainable_variables], 1)
    same = bool(tf.reduce_all(hvd.allgather(weights, name="weights") == weights))
    if hvd.rank() == 0:
        print(f"ResNet-{args.depth}, {model.count_params():,} parameters, {hvd.size()} rank(s)")
        print(f"loss of the first step {first:.4f}, of the last {last:.4f}; accuracy {accuracy:.2%}")
        print(f"images/s of {hvd.size()} rank(s): {np.mean(rates):.1f} +- {np.std(rates):.1f} over {len(rates)} steps")
        print(f"weights on {hvd.size()} rank(s): {'identical' if same else 'DIFFERENT'}", flush=True)
        if args.checkpoints is not None:  # step 7: rank 0 alone saves
            args.checkpoints.mkdir(parents=True, exist_ok=True)
            model.save_weights(args.checkpoints / f"resnet{args.depth}.weights.h5")
    if not same:
        raise SystemExit("the weights of ranks differ")


if __name__ == "__main__":
    main()
