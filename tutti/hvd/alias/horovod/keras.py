"""Not there yet, and says so."""

raise ImportError(
    "horovod.keras is not there yet: tutti has Horovod's API for PyTorch (horovod.torch). "
    "Use horovod.torch, or the distribution horovod for this framework."
)
