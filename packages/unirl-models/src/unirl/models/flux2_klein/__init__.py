"""FLUX.2 Klein through the classes of diffusers and transformers (extra `diffusers`)."""
