"""Packed datasets: samples in tar shards with an index, written once and read by position."""
