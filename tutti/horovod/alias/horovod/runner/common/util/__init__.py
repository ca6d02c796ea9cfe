"""Small questions."""
