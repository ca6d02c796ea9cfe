"""Where the time goes: reading, computing, communicating; what bounds a run, and what to change."""
