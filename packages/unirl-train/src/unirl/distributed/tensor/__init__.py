"""How tensors travel between the processes of a run."""
