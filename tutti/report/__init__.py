"""Pictures and pages from the records of runs and studies."""
