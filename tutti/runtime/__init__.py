"""Who am I: rank discovery, device, process group, seeds, deadlines."""
