"""HunyuanImage 2.1 through the classes of diffusers and transformers (extra `diffusers`)."""
