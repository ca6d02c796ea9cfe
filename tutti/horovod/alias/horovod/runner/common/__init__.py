"""What the launcher and its workers share."""
