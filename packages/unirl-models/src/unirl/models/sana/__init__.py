"""Sana through the classes of diffusers and transformers (extra `diffusers`)."""
