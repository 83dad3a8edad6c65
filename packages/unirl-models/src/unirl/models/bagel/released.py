"""Sizes of the released checkpoints of BAGEL."""

from unirl.models.released import IMAGE_VAE, Released

RELEASED = {
    # Both experts; of a token one computes. Prompts are read by the decoder itself.
    "ByteDance-Seed/BAGEL-7B-MoT": Released(
        trained=14.1, text=0.0, width=3584, blocks=28, text_tokens=512, text_width=1, beside=0.5, **IMAGE_VAE
    ),
}
