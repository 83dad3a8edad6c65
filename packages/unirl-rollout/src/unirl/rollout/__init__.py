"""Rollout engines behind one protocol (`unirl.types.protocols.engines.RolloutEngine`)."""
