"""Scorers of videos by their frames (extra `clip`)."""
