"""Stable Diffusion XL through the classes of diffusers and transformers (extra `diffusers`)."""
