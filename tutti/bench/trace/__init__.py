"""Traces of steps: recorded on every rank, merged into one timeline, and summarised."""
