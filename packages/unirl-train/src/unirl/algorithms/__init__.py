"""Algorithms: losses as pure functions (`losses`), advantages (`advantages`), and one file an algorithm."""
