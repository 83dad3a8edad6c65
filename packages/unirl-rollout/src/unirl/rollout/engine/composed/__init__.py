"""A text engine and a diffusion engine as one: texts first, then images of each text."""
