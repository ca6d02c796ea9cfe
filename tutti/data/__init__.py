"""Datasets, the global sample order, augmentation and loaders."""
