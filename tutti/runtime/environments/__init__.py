"""One question, "who am I in this job?", and one file per answer."""
