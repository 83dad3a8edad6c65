"""The moves world: coloured shapes that move, for a small Wan 2.1, with its base checkpoint."""
