"""The Horovod API on torch.distributed: engine, frameworks, elastic jobs, and the launcher `horovodrun`."""

__version__ = "0.28.1+tutti"  # the version of the API, and who provides it
