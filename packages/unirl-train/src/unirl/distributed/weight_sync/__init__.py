"""Pushes the trained policy to engines, whole or as an adapter; verified by the engine and proved by its log-probs."""
