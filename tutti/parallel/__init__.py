"""Data parallelism: DDP, gradient averaging and batch-norm statistics."""
