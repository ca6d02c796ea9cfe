"""Measure the throughput of a residual network on synthetic images, with Horovod's API.

horovodrun -np 2 python examples/horovod/pytorch_resnet_synthetic.py --model resnet18 --batch-size 8 --image-size 64
srun -n 8 python examples/horovod/pytorch_resnet_synthetic.py --fp16-allreduce
"""

import argparse
import statistics
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F

from tutti.models.resnet import resnet18, resnet34, resnet50

MODELS = {"resnet18": resnet18, "resnet34": resnet34, "resnet50": resnet50}


def print_once(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the throughput of a residual network, with Horovod's API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="images for each rank in a step")
    parser.add_argument("--image-size", type=int, default=224, help="pixels on a side")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True

    model = MODELS[args.model]().to(device)
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(0, 1000, (args.batch_size,), device=device)

    def steps(count: int) -> float:
        """Run some steps and return the images per second of this rank."""
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return args.batch_size * count / (time.perf_counter() - began)

    print_once(
        f"{args.model}, {args.batch_size} images of {args.image_size}^2 a rank, {hvd.size()} rank(s) on {device.type}"
    )
    steps(args.num_warmup_batches)
    rates = []
    for iteration in range(1, args.num_iters + 1):
        rates.append(steps(args.num_batches_per_iter))
        print_once(f"{iteration}/{args.num_iters}: {rates[-1]:.1f} images/s a rank")
    mean, deviation = statistics.fmean(rates), statistics.pstdev(rates)
    print_once(f"images/s a rank: {mean:.1f} +- {1.96 * deviation:.1f}")
    print_once(f"images/s of {hvd.size()} rank(s): {hvd.size() * mean:.1f} +- {hvd.size() * 1.96 * deviation:.1f}")


if __name__ == "__main__":
    main()
