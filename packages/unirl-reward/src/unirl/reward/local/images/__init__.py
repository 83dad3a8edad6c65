"""Scorers of images by CLIP-like models (extra `clip`), by their compressed size, and by labels of the data."""
