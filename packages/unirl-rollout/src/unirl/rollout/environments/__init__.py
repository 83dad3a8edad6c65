"""Environments: what answers a policy, by turns of text or by steps."""
