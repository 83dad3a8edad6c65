"""Scorers of the sound of videos (extra `sound`)."""
