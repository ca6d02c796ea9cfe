"""The command `tutti`: parse, call, print, exit code."""
