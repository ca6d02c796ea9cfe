"""Many runs of one recipe: on several numbers of ranks, with several batches and rates, and what they show together."""
