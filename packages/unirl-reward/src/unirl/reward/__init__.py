"""Rewards: scorers, the service that composes them, and what happens to samples that cannot be scored."""
