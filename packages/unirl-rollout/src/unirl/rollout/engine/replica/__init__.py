"""Engines that sample with a copy of the model, which the policy is pushed to; nothing else need be installed."""
