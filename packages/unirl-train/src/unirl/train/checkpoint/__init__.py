"""Checkpoints of a run: written aside, verified, renamed; the newest sound one is resumed from, bit for bit."""
