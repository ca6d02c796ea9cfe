"""How ranks start: on this machine by torchrun's agent, or by a launcher that is already there."""
