"""The tabletop world: a pusher brings a block onto a ring, seen as images of 64 pixels, for small policies that act."""
