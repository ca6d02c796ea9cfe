"""Train on MNIST with PyTorch in one process: the exercise whose solution is pytorch_mnist.py.

    python examples/horovod/pytorch_mnist_serial.py

Make it run on several ranks with Horovod's API, in eight steps: start, pin the device, shard the data, scale the
learning rate, average gradients, broadcast the first weights, save on rank 0 alone, average metrics.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST in one process.")
    parser.add_argument("--data", type=Path, help="folder of MNIST's four files")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: a GPU where there is one")
    parser.add_argument("--checkpoint", type=Path, help="file into which model and optimizer are saved")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    device = torch.device("cpu" if args.device == "cpu" or not torch.cuda.is_available() else "cuda")
    train_data, test_data = load(args.data)
    train_loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=1000)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(1, args.epochs + 1):
        model.train()
        total = torch.zeros((), device=device)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        model.eval()
        with torch.no_grad():
            right = 0
            for images, labels in test_loader:
                right += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
        mean = total.item() / len(train_loader)
        print(f"epoch {epoch}: train loss {mean:.4f}, accuracy {right / len(test_data):.2%}", flush=True)
        if args.checkpoint is not None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, args.checkpoint)


if __name__ == "__main__":
    main()
