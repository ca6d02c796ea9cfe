"""Records to pages and pictures."""
