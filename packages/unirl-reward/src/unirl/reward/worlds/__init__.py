"""Scorers of the worlds that come with the trainer: small tasks with an exact verifier."""
