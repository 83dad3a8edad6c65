"""The trained policy on its way to an engine: whole or as an adapter, verified there, proved by its log-probs."""
