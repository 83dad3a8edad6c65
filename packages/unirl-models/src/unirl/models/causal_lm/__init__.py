"""Causal language models of transformers: the bundle that loads any of them, and attention over packed samples."""
