"""Teach a small autoencoder of images."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def signed(pixels: Tensor) -> Tensor:
    """uint8 pixels as floats in [-1, 1], as autoencoders of diffusers take them."""
    return pixels.float() / 127.5 - 1


def train_autoencoder(
    vae: Any,  # Any: autoencoders of diffusers share no base class with `encode`
    drawings: Tensor,
    as_input: Callable[[Tensor], Tensor],
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float = 4e-3,
    kl_weight: float = 1e-3,
) -> None:
    """Train in place by absolute and squared error of random drawings, [N, ...] uint8, and the posterior's divergence.

    as_input: drawings as the encoder takes them.
    """
    optimizer = torch.optim.AdamW(vae.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=num_steps, pct_start=0.1)
    for step in range(num_steps):
        pictures = as_input(drawings[torch.randint(len(drawings), (batch_size,))])
        posterior = vae.encode(pictures).latent_dist
        restored = vae.decode(posterior.sample()).sample
        error = nn.functional.l1_loss(restored, pictures) + nn.functional.mse_loss(restored, pictures)
        loss = error + kl_weight * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == num_steps - 1:
            logger.info("autoencoder step %d loss %.4f error %.4f", step, loss.item(), error.item())
