"""The memory of a rank: predicted before a run, measured in it, and what to change where it does not suffice."""
