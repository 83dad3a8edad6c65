"""Checkpoints of random weights that a CPU samples from in seconds, for tests and measurements; a module per family.

text    text encoders and tokenizers that families share
images  autoencoders and schedulers that families share
saving  how pipelines of diffusers are written
"""
