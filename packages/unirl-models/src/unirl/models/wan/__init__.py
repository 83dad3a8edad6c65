"""Wan 2.1 and 2.2 through the classes of diffusers and transformers (extra `diffusers`)."""
