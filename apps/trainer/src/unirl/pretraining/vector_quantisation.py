"""Teach a small autoencoder of Janus whose latents are codes.

Shape letters: B images, N codes of all images, K codes of the codebook, D width of a code.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers.models.janus.modeling_janus import JanusVQVAE

from unirl.pretraining.autoencoding import signed

logger = logging.getLogger(__name__)

COMMITMENT = 0.25
RESTART_EVERY = 50
"""Steps after which codes that no image used are moved to latents of the batch."""


def codes_of(vq: JanusVQVAE, images: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [N, D] of length 1, and the nearest code of each, int64 [N]. images: [B, 3, H, W] in [-1, 1]."""
    latents = vq.quant_conv(vq.encoder(images))
    latents_ND = nn.functional.normalize(latents.permute(0, 2, 3, 1).flatten(0, 2), dim=-1)
    codebook_KD = nn.functional.normalize(vq.quantize.embedding.weight, dim=-1)
    return latents_ND, (latents_ND @ codebook_KD.T).argmax(-1)


def train_vector_quantiser(
    vq: JanusVQVAE, drawings: Tensor, *, num_steps: int, batch_size: int = 16, learning_rate: float = 3e-3
) -> None:
    """Train in place by absolute and squared error of random drawings, uint8 [N, 3, H, W]; codes end at length 1.

    Codes are compared by direction, as `JanusVQVAE.decode` reads them.
    """
    embedding = vq.quantize.embedding.weight
    nn.init.normal_(embedding)
    optimizer = torch.optim.AdamW(vq.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=num_steps, pct_start=0.1)
    is_used = torch.zeros(len(embedding), dtype=torch.bool)
    for step in range(num_steps):
        pictures = signed(drawings[torch.randint(len(drawings), (batch_size,))])
        latents_ND, codes_N = codes_of(vq, pictures)
        is_used[codes_N] = True
        quantised_ND = nn.functional.normalize(embedding, dim=-1)[codes_N]
        through_ND = latents_ND + (quantised_ND - latents_ND).detach()
        side = vq.quantize.quant_state_dims
        restored = vq.decoder(vq.post_quant_conv(through_ND.view(batch_size, *side, -1).permute(0, 3, 1, 2)))
        error = nn.functional.l1_loss(restored, pictures) + nn.functional.mse_loss(restored, pictures)
        to_codes = (quantised_ND - latents_ND.detach()).square().sum(-1).mean()
        to_latents = (quantised_ND.detach() - latents_ND).square().sum(-1).mean()
        optimizer.zero_grad()
        (error + to_codes + COMMITMENT * to_latents).backward()
        nn.utils.clip_grad_norm_(vq.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % RESTART_EVERY == RESTART_EVERY - 1 and step < num_steps * 3 // 4:
            unused = (~is_used).nonzero().flatten()
            with torch.no_grad():
                embedding[unused] = latents_ND[torch.randint(len(latents_ND), (len(unused),))]
            is_used.zero_()
        if step % 100 == 0 or step == num_steps - 1:
            logger.info("codes step %d error %.4f, %d used", step, error.item(), int(is_used.sum()))
    with torch.no_grad():
        embedding.copy_(nn.functional.normalize(embedding, dim=-1))
