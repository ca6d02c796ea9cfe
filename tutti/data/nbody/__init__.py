"""Boxes of matched N-body and hydrodynamic fields, and random crops of them."""
