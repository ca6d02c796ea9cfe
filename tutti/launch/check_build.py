"""What `horovodrun --check-build` prints: the frameworks, controllers and operations that are here."""

from importlib.util import find_spec

from tutti.launch.horovodrun_options import HOROVOD_VERSION

# Each framework with the module that scripts of it import, and its own.
_FRAMEWORKS = {
    "TensorFlow": ("tutti.hvd.tensorflow", "tensorflow"),
    "PyTorch": ("tutti.hvd.torch", "torch"),
    "MXNet": ("tutti.hvd.mxnet", "mxnet"),
}


def check_build() -> str:
    """The table."""
    gloo, nccl = _torch_backends()
    groups = {
        "Available Frameworks": {name: all(map(_is_here, modules)) for name, modules in _FRAMEWORKS.items()},
        "Available Controllers": {"MPI": False, "Gloo": gloo},
        "Available Tensor Operations": {"NCCL": nccl, "DDL": False, "CCL": False, "MPI": False, "Gloo": gloo},
    }
    lines = [f"Horovod v{HOROVOD_VERSION}:"]
    for title, rows in groups.items():
        lines += ["", f"{title}:", *(f"    [{'X' if here else ' '}] {name}" for name, here in rows.items())]
    return "\n".join(lines)


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _torch_backends() -> tuple[bool, bool]:
    """Whether torch, which moves the tensors, has Gloo, and NCCL with a GPU."""
    if not _is_here("torch"):
        return False, False
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return False, False
    return dist.is_gloo_available(), torch.cuda.is_available() and dist.is_nccl_available()
