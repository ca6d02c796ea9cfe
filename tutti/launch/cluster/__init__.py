"""Jobs on a cluster: schedulers, sites, job scripts, submission, status, requeueing."""
