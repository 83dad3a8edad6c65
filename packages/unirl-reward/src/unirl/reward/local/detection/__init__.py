"""Scorers that find objects with a detector (extra `geneval`)."""
