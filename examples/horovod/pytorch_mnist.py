"""Train on MNIST with PyTorch and Horovod's API: one process for each device, gradients averaged over all ranks.

    horovodrun -np 2 python examples/horovod/pytorch_mnist.py
    mpirun -np 2 python examples/horovod/pytorch_mnist.py
    tutti run -n 2 examples/horovod/pytorch_mnist.py

Without --data it trains on the small digits that come with scikit-learn, enlarged to 28 x 28 pixels. The comments
count the eight steps from pytorch_mnist_serial.py, the same program for one process, to this one.
"""

import argparse
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(F.dropout(x, training=self.training)), dim=1)


def load(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, from MNIST's four files or from scikit-learn."""
    if folder is not None:
        from tutti.data.mnist import FILES, MEAN, STD, find_file, read_idx

        splits = []
        for split in ("train", "valid"):
            images, labels = (find_file(folder, name) for name in FILES[split])
            pixels = torch.from_numpy(read_idx(images, 3)).unsqueeze(1).float() / 255
            splits.append(TensorDataset((pixels - MEAN) / STD, torch.from_numpy(read_idx(labels, 1)).long()))
        return splits[0], splits[1]
    from sklearn.datasets import load_digits

    digits, target = load_digits(return_X_y=True)
    pixels = torch.tensor(digits, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    images, labels = F.interpolate(pixels, size=28, mode="bilinear"), torch.tensor(target)
    return TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])


def choose_device(wanted: str | None) -> torch.device:
    """2. pin each process to a GPU of its own: the one of its local rank."""
    if wanted == "cpu" or (wanted is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epoch: int, device: torch.device
) -> float:
    model.train()
    total = torch.zeros((), device=device)
    for step, (images, labels) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % 100 == 0 and hvd.rank() == 0:
            print(f"epoch {epoch}  step {step}/{len(loader)}  loss {loss.item():.4f}", flush=True)
    # 8. average metrics over ranks before they are printed
    return hvd.allreduce(total / len(loader), name="train_loss").item()


def test(model: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Return the loss and the accuracy, averaged over ranks."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            outputs = model(images)
            loss += F.nll_loss(outputs, labels, reduction="sum").item()
            right += int((outputs.argmax(1) == labels).sum())
            count += len(labels)
    averages = hvd.allreduce(torch.tensor([loss / count, right / count]), name="test")
    return averages[0].item(), averages[1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST with Horovod's API.")
    parser.add_argument("--data", type=Path, help="folder of MNIST's four files")
    parser.add_argument("--batch-size", type=int, default=64, help="images for each rank in a step")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: a GPU for each rank where there are any")
    parser.add_argument("--checkpoint", type=Path, help="file into which rank 0 saves model and optimizer")
    args = parser.parse_args()

    hvd.init()  # 1. start: rank, size and local rank are known from here on
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    device = choose_device(args.device)

    # 3. shard the data: each rank gets other samples, all of them together an epoch
    train_data, test_data = load(args.data)
    sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)
    test_sampler = DistributedSampler(test_data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_data, batch_size=1000, sampler=test_sampler)

    model = Net().to(device)
    # 4. scale the learning rate with the global batch
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    # 6. broadcast the first weights and the state of the optimizer from rank 0
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # 5. average the gradients of all ranks in each step
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train_loss = train_epoch(model, optimizer, train_loader, epoch, device)
        loss, accuracy = test(model, test_loader, device)
        if hvd.rank() == 0:
            if args.checkpoint is not None:  # 7. save on rank 0 alone
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, args.checkpoint)
            print(
                f"epoch {epoch}: train loss {train_loss:.4f}, test loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True
            )

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    same = bool((hvd.allgather(weights.unsqueeze(0), name="weights") == weights).all())
    if hvd.rank() == 0:
        print(f"weights on {hvd.size()} rank(s): {'identical' if same else 'DIFFERENT'}", flush=True)


if __name__ == "__main__":
    main()
