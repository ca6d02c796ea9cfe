"""Sets up Keras and its backend for this rank: threads, GPU, precision."""

import contextlib
import os
import sys
from collections.abc import Iterator

from tutti.config.framework import check_installed, keras_backend
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, LaunchError
from tutti.ranks.device import choose_device, set_determinism, set_threads
from tutti.ranks.group import Machine
from tutti.ranks.placement import Placement


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Discards standard error while TensorFlow is imported, which some of Keras' functions do on any backend.

    Triton, where torch has it, is imported before: in the other order it ends the process with SIGSEGV, for example
    when an optimizer of torch is made after a Keras model was opened.
    """
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


_POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


def prepare(config: RunConfig, placement: Placement) -> Machine:
    """Import Keras and set it up for a run; call this before its backend computes anything."""
    check_installed(config)
    backend = keras_backend(config)
    threads = set_threads(config.runtime, placement)
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if config.runtime.device == "cpu":
        os.environ |= {"KERAS_TORCH_DEVICE": "cpu", "JAX_PLATFORMS": "cpu"}
    if backend == "jax":
        _prepare_jax(threads)
    with quiet_import():
        import keras
    if keras.backend.backend() != backend:
        raise ConfigError(
            f"backend={backend}, but Keras was imported on {keras.backend.backend()} before this run. "
            f"Set KERAS_BACKEND={backend} before the program imports keras."
        )
    use = {"tensorflow": _use_tensorflow, "jax": _use_jax, "torch": _use_torch}[backend]
    device, name = use(config, placement, threads)
    keras.config.set_dtype_policy(_POLICIES[config.precision])
    return Machine(device, name, threads)


def _use_tensorflow(config: RunConfig, placement: Placement, threads: int) -> tuple[str, str]:
    with quiet_import():
        import tensorflow as tf

        import tutti.horovod.tensorflow  # noqa: F401  # gives TensorFlow more threads, since some wait for other ranks
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    if config.runtime.deterministic:
        tf.config.experimental.enable_op_determinism()
    gpus = [] if config.runtime.device == "cpu" else tf.config.list_physical_devices("GPU")
    index = _choose_gpu(config, placement, len(gpus))
    if index is None:
        tf.config.set_visible_devices([], "GPU")
        return "cpu", "cpu"
    tf.config.set_visible_devices(gpus[index], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return "cuda", tf.config.experimental.get_device_details(gpus[index]).get("device_name", "GPU")


def _prepare_jax(threads: int) -> None:
    """Set the variables that JAX reads when it is imported."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if threads == 1 and "xla_cpu_multi_thread_eigen" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()


def _use_jax(config: RunConfig, placement: Placement, threads: int) -> tuple[str, str]:
    import jax

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if placement.local_size > 1 and (shown is None or "," in shown):  # otherwise the launcher has given each rank a GPU
        jax.config.update("jax_cuda_visible_devices", str(placement.local_rank))
    [device, *_] = jax.local_devices()
    if device.platform == "cpu":
        _choose_gpu(config, placement, 0)
        return "cpu", "cpu"
    return "cuda", device.device_kind


def _use_torch(config: RunConfig, placement: Placement, threads: int) -> tuple[str, str]:
    import torch

    set_determinism(config.runtime)
    device = choose_device(config.runtime, placement)
    return device.type, torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _choose_gpu(config: RunConfig, placement: Placement, count: int) -> int | None:
    """The number of this rank's GPU, or None on the CPU."""
    if config.runtime.device == "cuda" and not count:
        raise LaunchError(
            f"runtime.device='cuda', but {keras_backend(config)} sees no GPU here. Set runtime.device=cpu."
        )
    if config.runtime.device == "cpu" or not count:
        return None
    if count == 1 and placement.launcher != "torchrun":  # the launcher has given each rank one GPU
        return 0
    if count < placement.local_size:
        raise LaunchError(
            f"{placement.local_size} ranks on this host, but {count} visible GPU(s): each rank needs its own. "
            f"Start {count} rank(s), or set runtime.device=cpu."
        )
    return placement.local_rank
