"""The loop: what happens in a step, and what a run is made of."""
