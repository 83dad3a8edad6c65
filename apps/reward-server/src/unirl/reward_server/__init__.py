"""The reward service behind HTTP, for reward nodes that run nothing else."""
