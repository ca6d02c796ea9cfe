"""The models and optimizers that are held against torch's, with the options that they are built with."""

from typing import Any

MODELS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("mnist_torch", (1, 28, 28), {}),
    ("mnist_keras", (1, 28, 28), {}),
    ("cnn", (3, 32, 32), {}),
    ("alexnet_small", (3, 32, 32), {"dense": 64}),
    ("resnet_small", (3, 32, 32), {}),
    ("resnet18", (3, 64, 64), {"zero_init_last": False}),
    ("resnet34", (3, 32, 32), {"stem": "small", "zero_init_last": False}),
    ("resnet50", (3, 64, 64), {"zero_init_last": False}),
    ("mlp", (1, 8, 8), {"batch_norm": True}),
    ("small_cnn", (1, 9, 9), {"width": 8}),
    ("small_cnn", (3, 8, 8), {"width": 8, "batch_norm": False}),
]
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.1, "momentum": 0.9}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("sgd", {"lr": 0.1}),
    ("adam", {"lr": 0.01}),
    ("adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("adamw", {"lr": 0.01, "weight_decay": 0.1}),
]
