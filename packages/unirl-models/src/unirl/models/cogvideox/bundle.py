"""The modules of a CogVideoX pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.cogvideox.text import CogVideoXTextEncoders
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.extras import from_extra
from unirl.models.token_plan import IMAGE, TEXT, TokenPlan, Tokens

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX
    from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel
    from transformers import T5EncoderModel


class CogVideoXBundle(DiffusersBundle):
    """Transformer, VAE, T5 and tokenizer of one checkpoint of CogVideoX or CogVideoX 1.5, see `DiffusersBundle`."""

    family = "CogVideoX"
    pipeline_classes = ("CogVideoXPipeline",)
    components = {
        "transformer": trained(CogVideoXTransformer3DModel),
        "vae": autoencoder(AutoencoderKLCogVideoX),
        "text_encoder": text_encoder(T5EncoderModel),
        "tokenizer": processor(),
    }
    text_class = CogVideoXTextEncoders
    block_class_names = ("CogVideoXBlock",)
    spreads_tokens = True
    token_plan = TokenPlan(
        arguments={
            "": {"image_rotary_emb": Tokens("image", 0)},
            "transformer_blocks.0": {"hidden_states": IMAGE, "encoder_hidden_states": TEXT},
        },
        attention={"transformer_blocks.*.attn1": ("text", "image")},
        whole_again={"proj_out": IMAGE},
    )
    # The projections of the attention over text and video.
    lora_target_modules = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")
    # Latent frames are decoded in pairs after the first, so there is an odd number of them, four frames each.
    frame_divisor = 8
