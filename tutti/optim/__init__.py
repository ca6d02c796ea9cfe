"""Optimizers, learning-rate scaling rules and schedules."""
