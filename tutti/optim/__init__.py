"""Optimizers, and the scale of gradient noise."""
