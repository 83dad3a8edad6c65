"""Z-Image and Z-Image-Turbo through the classes of diffusers and transformers (extra `diffusers`)."""
