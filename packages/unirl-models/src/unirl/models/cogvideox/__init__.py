"""CogVideoX through the classes of diffusers and transformers (extra `diffusers`)."""
