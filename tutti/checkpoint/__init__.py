"""What is saved, when it is durable, and how it is read back on another number of ranks."""
