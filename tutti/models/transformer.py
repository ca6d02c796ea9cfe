"""Transformers: a GPT that predicts the next token, and a ViT on the patches of images or volumes."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from tutti.errors import ConfigError

_STD = 0.02  # of the first weights, as in GPT-2


class HeadMix(nn.Module):
    """The values of all places that a place attends to, for each head: (samples, heads, places, width)."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)


class Attention(nn.Module):
    """Attention of several heads; the rows of `qkv` are the query, key and value of the first head, then the next."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.head_width = width // heads
        self.mix = HeadMix(causal)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # The number of heads is what `qkv` gives: a layer may hold a part of them.
        by_head = self.qkv(inputs).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = (each.transpose(1, 2) for each in by_head.unbind(-2))
        return self.out(self.mix(query, key, value).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(inputs), approximate="tanh"))


class TransformerBlock(nn.Module):
    """Attention and feed-forward layers, each after a norm and added to its input, with dropout before the sum."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.attention_dropout = nn.Dropout(dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = FeedForward(width)
        self.mlp_dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs + self.attention_dropout(self.attention(self.attention_norm(inputs)))
        return inputs + self.mlp_dropout(self.mlp(self.mlp_norm(inputs)))


class TokenEmbedding(nn.Module):
    """A vector for each token plus one for its place, with dropout."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])


class PatchEmbedding(nn.Module):
    """A vector for each patch of an image or volume plus one for its place, with dropout."""

    def __init__(self, input_shape: Sequence[int], patch: int, width: int, dropout: float) -> None:
        super().__init__()
        channels, *size = input_shape
        convolution = nn.Conv2d if len(size) == 2 else nn.Conv3d
        self.patches = convolution(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(math.prod(side // patch for side in size), width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.patches(images).flatten(2).transpose(1, 2) + self.positions)


class TokenHead(nn.Module):
    """The scores of the next token at every place."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(inputs))


class ClassHead(nn.Module):
    """The scores of the classes, from the mean over all places."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(inputs).mean(1))


class Transformer(nn.Module):
    """An embedding, blocks and a head, one after another: each maps one tensor to one tensor."""

    def __init__(
        self, embedding: nn.Module, head: nn.Module, width: int, depth: int, heads: int, dropout: float, causal: bool
    ) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = embedding
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout, causal) for _ in range(depth))
        self.head = head
        for name, parameter in self.named_parameters():
            self.init_parameter(name, parameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def stages(self) -> list[str]:
        """The modules of which the model is a chain; it can be cut between any two."""
        return ["embedding", *(f"blocks.{index}" for index in range(len(self.blocks))), "head"]

    def tensor_plan(self) -> dict[str, str]:
        """How layers are divided over ranks: by the columns or the rows of the matrix that multiplies their input."""
        kinds = {"attention.qkv": "columns", "attention.out": "rows", "mlp.up": "columns", "mlp.down": "rows"}
        return {f"blocks.{index}.{name}": kind for index in range(len(self.blocks)) for name, kind in kinds.items()}

    def sequence_plan(self) -> dict[str, str]:
        """Where sequences are cut for ranks, and where each of their heads attends to all places."""
        return {"embedding": "cut", **{f"blocks.{index}.attention.mix": "heads" for index in range(len(self.blocks))}}

    @torch.no_grad()
    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator | None = None) -> None:
        """Fill a parameter with its first values; with a generator they depend on nothing else."""
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        elif parameter.ndim > 2:  # the convolution of patches
            parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
        else:
            ends_branch = name.endswith(("attention.out.weight", "mlp.down.weight"))
            parameter.normal_(0.0, _STD / math.sqrt(2 * len(self.blocks)) if ends_branch else _STD, generator=generator)


class GPT(Transformer):
    """A transformer in which each token sees those before it; it gives the scores of the next one at every place."""

    def __init__(
        self, vocabulary: int, context: int, width: int = 128, depth: int = 4, heads: int = 4, dropout: float = 0.0
    ) -> None:
        _check_heads(width, heads)
        embedding = TokenEmbedding(vocabulary, context, width, dropout)
        super().__init__(embedding, TokenHead(width, vocabulary), width, depth, heads, dropout, causal=True)

    def tensor_plan(self) -> dict[str, str]:
        """How layers are divided over ranks; the table of tokens and the scores too."""
        return {"embedding.tokens": "rows", **super().tensor_plan(), "head.scores": "gathered columns"}


class ViT(Transformer):
    """A transformer on the patches of images (channels, height, width) or volumes."""

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        patch: int = 4,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
        dropout: float = 0.0,
    ) -> None:
        _check_heads(width, heads)
        _check_patches(input_shape, patch)
        embedding = PatchEmbedding(input_shape, patch, width, dropout)
        super().__init__(embedding, ClassHead(width, num_classes), width, depth, heads, dropout, causal=False)

    def sequence_plan(self) -> dict[str, str]:
        """Where sequences are cut and heads attend to all places; the classes are those of whole sequences."""
        return {**super().sequence_plan(), "head": "whole"}


def gpt(
    input_shape: Sequence[int],
    num_classes: int,
    vocabulary: int | None = None,
    context: int | None = None,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
) -> GPT:
    """Returns a GPT for sequences of `input_shape[0]` tokens of `num_classes` kinds, or for longer ones of more."""
    if len(input_shape) != 1:
        raise ConfigError(
            f"model.name='gpt' with samples of shape {tuple(input_shape)}: expected sequences of tokens. "
            "Choose such data, as data.name=text, or model.name=vit for images and volumes."
        )
    for key, given, needed in (("vocabulary", vocabulary, num_classes), ("context", context, input_shape[0])):
        if given is not None and given < needed:
            raise ConfigError(
                f"model.{key}={given}: expected at least the {needed} of the data. Set model.{key}={needed} or more, "
                "or leave it out."
            )
    return GPT(vocabulary or num_classes, context or input_shape[0], width, depth, heads, dropout)


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        fits = max(1, round(width / heads)) * heads
        raise ConfigError(f"model.width={width}: expected a multiple of model.heads={heads}. Set model.width={fits}.")


def _check_patches(input_shape: Sequence[int], patch: int) -> None:
    if len(input_shape) not in (3, 4) or any(side % patch for side in input_shape[1:]):
        raise ConfigError(
            f"model.name='vit' with samples of shape {tuple(input_shape)} and model.patch={patch}: expected images or "
            "volumes, whose sides are multiples of model.patch. Change model.patch, or choose other data."
        )
