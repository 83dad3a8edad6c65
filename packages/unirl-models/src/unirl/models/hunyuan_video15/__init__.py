"""HunyuanVideo 1.5 through the classes of diffusers and transformers (extra `diffusers`)."""
