"""The modules of a Stable Diffusion 3 pipeline folder, and what training needs to know of them."""

from __future__ import annotations

import torch

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.sd3.text import SD3TextEncoders
from unirl.types.precision import dtype_named

try:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
    from transformers import CLIPTextModelWithProjection, PreTrainedModel, T5EncoderModel
except ImportError as error:
    raise ImportError(
        "unirl.models.sd3 needs diffusers and transformers: pip install 'unirl-models[diffusers]'"
    ) from error


class SD3Bundle(DiffusersBundle):
    """Transformer, VAE, text encoders and tokenizers of one checkpoint, in evaluation mode.

    pretrained_model: a diffusers pipeline folder or a hub id. dtype: of the transformer, "fp32", "bf16" or "fp16";
    text_encoder_dtype: of the text encoders, None takes `dtype`; vae_dtype: of the VAE, float32 by default because
    half-precision decoding shows. device: where all of it lives. load_t5: False leaves the T5 encoder out even where
    the checkpoint has it; its part of the sequence is zeros then, as in diffusers.
    The transformer alone keeps requires_grad. Raises CheckpointError or ConfigError before weights are read where the
    folder is missing, incomplete or of another pipeline class, and CheckpointError for weights that do not fit.
    """

    family = "SD3"
    pipeline_class = "StableDiffusion3Pipeline"
    block_class_names = ("JointTransformerBlock",)
    # The projections of the joint attention, image and text side.
    lora_target_modules = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    def __init__(
        self,
        pretrained_model: str,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        vae_dtype: str = "fp32",
        *,
        text_encoder_dtype: str | None = None,
        load_t5: bool = True,
    ) -> None:
        transformer_dtype = dtype_named(dtype, "dtype")
        text_dtype = dtype_named(dtype if text_encoder_dtype is None else text_encoder_dtype, "text_encoder_dtype")
        decoder_dtype = dtype_named(vae_dtype, "vae_dtype")
        super().__init__(pretrained_model, device)
        clip = CLIPTextModelWithProjection
        encoders: dict[str, type[PreTrainedModel]] = {"text_encoder": clip, "text_encoder_2": clip}
        tokenizers = ["tokenizer", "tokenizer_2"]
        has_t5 = load_t5 and self.folder.class_of("text_encoder_3") is not None
        if has_t5:
            encoders["text_encoder_3"] = T5EncoderModel
            tokenizers.append("tokenizer_3")
        self.require({"transformer": SD3Transformer2DModel, "vae": AutoencoderKL, **encoders}, tokenizers)

        self.transformer: SD3Transformer2DModel = self.load(
            "transformer", SD3Transformer2DModel, transformer_dtype, trains=True
        )
        self.vae: AutoencoderKL = self.load("vae", AutoencoderKL, decoder_dtype)
        # Convolutions without a layout change around each: a third less time on a CPU, tensor cores on a GPU.
        self.vae.to(memory_format=torch.channels_last)
        loaded = {name: self.load(name, model_class, text_dtype) for name, model_class in encoders.items()}
        self.text = SD3TextEncoders(
            loaded if has_t5 else {**loaded, "text_encoder_3": None},
            {name: self.load_tokenizer(name) for name in tokenizers},
            width=self.transformer.config["joint_attention_dim"],
        )

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent element on a side."""
        return 2 ** (len(self.vae.config["block_out_channels"]) - 1)
