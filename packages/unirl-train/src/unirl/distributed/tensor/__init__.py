"""Moves tensors between the processes of a run."""
