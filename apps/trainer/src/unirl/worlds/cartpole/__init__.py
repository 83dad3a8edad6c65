"""Starts for gymnasium's CartPole, which a policy learns from nothing by its state."""
