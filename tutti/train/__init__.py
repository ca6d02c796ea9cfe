"""The loop, the job of every framework, and the learner of torch."""
