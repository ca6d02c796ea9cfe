"""Elastic training without a framework: the state to keep, the loop that goes on, the line to the driver."""
