"""Scorers in a child process with another Python environment, for models whose libraries fit into no other."""
