"""The Horovod API on torch.distributed: an engine that matches tensors by name, and what scripts call."""
