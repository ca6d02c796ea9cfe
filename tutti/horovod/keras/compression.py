"""How gradients are made smaller for their way between ranks, whichever framework they are tensors of."""

from typing import Any

import torch

from tutti.horovod.torch.compression import Compression as TorchCompression


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16Compressor:
    """Floating-point tensors travel in half precision, others as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _halves(tensor).compress(tensor)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return _halves(tensor).decompress(tensor, ctx)


class Compression:
    """The compressors that come with Horovod."""

    none = NoneCompressor
    fp16 = FP16Compressor


def _halves(tensor: Any) -> Any:
    if isinstance(tensor, torch.Tensor):
        return TorchCompression.fp16
    from tutti.horovod.tensorflow.compression import Compression as TensorFlowCompression

    return TensorFlowCompression.fp16
