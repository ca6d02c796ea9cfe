"""One rank among others: its environment, rendezvous, process group, device, threads, hang detection, seeds."""
