"""Runs a recipe's own code on a device that computes nothing, and counts what a real one would hold and compute."""
