"""Sizes of the released checkpoints of Stable Diffusion 3.5."""

from unirl.models.released import IMAGE_VAE, Released

RELEASED = {
    # 31 tensors in the 13 blocks with two attentions, 22 and 20 in the others.
    "stabilityai/stable-diffusion-3.5-medium": Released(
        trained=2.47, text=5.58, width=1536, blocks=24, text_tokens=333, text_width=4096, kept_per_token=27, **IMAGE_VAE
    ),
    # InstantX/SD3-Controlnet-Canny next to it.
    "./models/sd3-controlnet-canny": Released(
        trained=2.08, text=5.58, width=1536, blocks=24, text_tokens=333, text_width=4096, beside=0.6, **IMAGE_VAE
    ),
}
