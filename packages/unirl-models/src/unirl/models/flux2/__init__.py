"""FLUX.2 through the classes of diffusers and transformers (extra `diffusers`): dev, and what Klein shares with it."""
