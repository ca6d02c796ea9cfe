"""What a run leaves: its folder, its record, its metrics, and their readers."""
