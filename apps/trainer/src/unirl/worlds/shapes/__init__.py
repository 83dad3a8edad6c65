"""The shapes world: coloured shapes drawn from a text, for a small Stable Diffusion 3, with its base checkpoint."""
