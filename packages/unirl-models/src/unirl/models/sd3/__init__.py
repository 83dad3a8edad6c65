"""Stable Diffusion 3 and 3.5 through the classes of diffusers and transformers (extra `diffusers`)."""
