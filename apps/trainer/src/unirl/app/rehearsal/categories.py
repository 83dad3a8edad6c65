"""What bytes on a device are for, as reports name it."""

from __future__ import annotations

ACTIVATIONS, OPTIMIZER, GRADIENTS, COPIES = "activations", "optimizer", "gradients", "copies"
TEXT_ENCODERS, REWARD_MODELS = "text encoders", "reward models"
SAMPLES = "samples"
"""Media, conditions and trajectories that wait to be trained on."""
ENGINE = "engine"
"""Weights, keys and values of an engine with separate weights."""
OF_STATE = {"parameters": "trained weights", "optimizer": OPTIMIZER}
"""What training keeps, by the beginning of its name in the saved state; the rest is copies."""
