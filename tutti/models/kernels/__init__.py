"""Triton kernels for layers on a GPU; importing a module needs triton and registers its operators with torch."""
