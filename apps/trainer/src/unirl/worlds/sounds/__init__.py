"""The sounds world: a coloured shape that moves and a tone, for a small LTX-2, with its base checkpoint."""
