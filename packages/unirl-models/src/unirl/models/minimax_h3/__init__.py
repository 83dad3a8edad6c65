"""MiniMax-H3 through the classes of diffusers and transformers (extra `diffusers`)."""
