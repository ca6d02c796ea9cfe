"""What is wrong with machines, found before a run meets it: ranks are compared, links measured, folders looked at."""
