"""Collectives measured over message sizes and numbers of ranks, and models of their time."""
