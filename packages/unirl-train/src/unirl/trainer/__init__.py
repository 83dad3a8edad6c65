"""The training loop: `wiring` builds the roles, `diffusion` walks rollout, reward, advantage, train, evaluate, save."""
