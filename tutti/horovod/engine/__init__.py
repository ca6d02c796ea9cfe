"""The engine: tensors matched by name over ranks, and carried out by torch.distributed in one order."""
