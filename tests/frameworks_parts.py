"""Keras' form of models, losses and optimizers held against torch's, on a rank that has Keras."""

from typing import Any

import keras
import numpy as np
import torch
from frameworks_names import MODELS, OPTIMIZERS
from torch import nn

from tutti.config import parts
from tutti.frameworks.learner import cross_entropy


def checks() -> dict[str, Any]:
    """By kind, what came out in both."""
    keras.config.set_dtype_policy("float32")
    return {
        "models": [_compare_models(*case) for case in MODELS],
        "optimizers": [_compare_optimizers(*case) for case in OPTIMIZERS],
        "losses": [_compare_losses(smoothing) for smoothing in (0.0, 0.1)],
    }


def _part(section: str, name: str, options: dict[str, Any]) -> parts.PartOptions:
    kind = dict(zip(parts.names_of(section), parts.parts_of(section), strict=True))[name]
    return kind(**options)


def _compare_models(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The numbers of parameters, and how far apart the scores are with the same weights."""
    part, offered = _part("model", name, options), {"input_shape": shape, "num_classes": 10}
    theirs = parts.call(part.locate(), "model", part.options(), **offered).eval()
    ours = parts.call(part.locate_in_keras(), "model", part.options(), **offered)
    _copy_weights(theirs, ours, shape)
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(images).numpy()
    found = keras.ops.convert_to_numpy(ours(images.movedim(1, -1).numpy(), training=False))
    counts = sum(p.numel() for p in theirs.parameters()), sum(int(np.prod(w.shape)) for w in ours.trainable_weights)
    return {
        "parameters": counts,
        "distance": float(np.abs(found - expected).max()),
        "size": float(np.abs(expected).max()),
    }


def _copy_weights(theirs: nn.Module, ours: Any, shape: tuple[int, ...]) -> None:
    """Layer by layer, in the order in which an image walks through them."""
    order: list[nn.Module] = []
    hooks = [
        module.register_forward_hook(lambda module, *_: order.append(module))
        for module in theirs.modules()
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d | nn.BatchNorm1d)
    ]
    with torch.no_grad():
        theirs(torch.zeros(2, *shape))
    for hook in hooks:
        hook.remove()
    own = [layer for layer in ours.layers if layer.weights]
    for kinds in ((nn.Conv2d,), (nn.Linear,), (nn.BatchNorm2d, nn.BatchNorm1d)):
        modules = [module for module in order if isinstance(module, kinds)]
        layers = [layer for layer in own if _is_like(layer, kinds[0])]
        for module, layer in _paired(modules, layers):
            layer.set_weights(_weights(module, layer))


def _is_like(layer: Any, kind: type[nn.Module]) -> bool:
    like = {nn.Conv2d: "Conv2D", nn.Linear: "Dense", nn.BatchNorm2d: "BatchNormalization"}
    return type(layer).__name__ == like[kind]


def _paired(modules: list[nn.Module], layers: list[Any]) -> list[tuple[nn.Module, Any]]:
    """Each layer with the next module of its shape: shortcuts come at another place in Keras' list."""
    left, pairs = list(modules), []
    for layer in layers:
        module = next(each for each in left if _weights(each, layer)[0].shape == tuple(layer.weights[0].shape))
        left.remove(module)
        pairs.append((module, layer))
    assert not left
    return pairs


def _weights(module: Any, layer: Any) -> list[np.ndarray]:
    weight = module.weight.detach()
    if isinstance(module, nn.Conv2d):
        weight = weight.permute(2, 3, 1, 0)
    elif isinstance(module, nn.Linear):
        weight = weight.T
        before = layer.input._keras_history.operation
        if type(before).__name__ == "Dropout":
            before = before.input._keras_history.operation
        if type(before).__name__ == "Flatten":  # torch flattens with the channels first
            height, width, channels = before.input.shape[1:]
            weight = weight.reshape(channels, height, width, -1).permute(1, 2, 0, 3).reshape(len(weight), -1)
    found = [weight.numpy()]
    if module.bias is not None:
        found.append(module.bias.detach().numpy())
    if hasattr(module, "running_mean"):
        found += [module.running_mean.numpy(), module.running_var.numpy()]
    return found


def _compare_optimizers(name: str, options: dict[str, Any]) -> float:
    """How far apart a weight is after six steps at rates that change."""
    part: Any = _part("optim", name, options)
    start = np.linspace(-1, 1, 5, dtype=np.float32)
    theirs = nn.Parameter(torch.from_numpy(start.copy()))
    step_torch = parts.call(part.locate(), "optim", part.options() | {"params": [theirs]})
    ours = keras.Variable(start)
    step_keras = parts.call(part.locate_in_keras(), "optim", part.options() | {"clip_norm": None})
    step_keras.build([ours])
    for step in range(6):
        gradient = np.cos(start * 3 + step).astype(np.float32)
        rate = part.lr * (1 + step) / 3
        step_torch.param_groups[0]["lr"] = rate
        step_keras.learning_rate = rate
        theirs.grad = torch.from_numpy(gradient)
        step_torch.step()
        step_keras.apply([keras.ops.convert_to_tensor(gradient)], [ours])
    return float(np.abs(keras.ops.convert_to_numpy(ours) - theirs.detach().numpy()).max())


def _compare_losses(smoothing: float) -> tuple[float, float]:
    scores = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    expected = nn.CrossEntropyLoss(label_smoothing=smoothing)(scores, labels)
    found = cross_entropy(smoothing)(labels.numpy(), scores.numpy())
    return float(expected), float(keras.ops.convert_to_numpy(found))
