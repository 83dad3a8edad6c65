"""Runs code that a model wrote in a process from which nothing is in reach."""
