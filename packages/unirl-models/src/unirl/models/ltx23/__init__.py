"""LTX-2.3 through the classes of diffusers and transformers (extra `diffusers`), sampled by LTX-2's pipeline."""
