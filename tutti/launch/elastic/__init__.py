"""Elastic training: hosts join and leave, ranks are lost, and training resumes in rounds from the last checkpoint."""
