"""Checks before a run: ranks are compared, links between hosts measured, and the run folder tested."""
