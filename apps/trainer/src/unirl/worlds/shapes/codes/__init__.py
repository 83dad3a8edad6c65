"""Images of shapes that a small Janus draws code by code."""
