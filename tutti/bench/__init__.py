"""Where the time of a step goes: data loading, compute, communication; the bottleneck, and what to change."""
