"""What a run is good for when it has ended: its numbers, its model, figures on other data, files for other programs."""
