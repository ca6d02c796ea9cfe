"""Optimizers by name, among them LARS and LAMB."""
