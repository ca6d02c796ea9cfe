"""What a run leaves: the run folder, its writers and its readers."""
