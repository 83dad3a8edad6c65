"""LTX-2 through the classes of diffusers and transformers (extra `diffusers`)."""
