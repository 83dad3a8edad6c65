"""Qwen-Image-Edit and -Edit-Plus through the classes of diffusers and transformers (extra `diffusers`)."""
