"""FLUX.1 dev, schnell, Kontext and Fill through the classes of diffusers and transformers (extra `diffusers`)."""
