"""Kernels of SGLang that PyPI has no CPU build of, in plain torch: two of diffusion models, one of text models."""
