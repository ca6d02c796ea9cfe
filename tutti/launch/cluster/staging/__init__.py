"""The Python environment on the disks of the nodes: what is packed, the archives, and the script of a node."""
