"""The modules of a FLUX.2 pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from typing import Any

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.lora_targets import JOINT_ATTENTION
from unirl.models.diffusers_pipeline.token_plans import FLUX_TOKENS
from unirl.models.experts import RankFollowing
from unirl.models.extras import from_extra
from unirl.models.flux2.text import Flux2TextEncoders
from unirl.types.errors import CheckpointError

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
    from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
    from transformers import Mistral3ForConditionalGeneration, PreTrainedTokenizerFast


class Flux2Bundle(RankFollowing, DiffusersBundle):
    """What dev and Klein share, see `DiffusersBundle`: a subclass adds its text encoder and tokenizer."""

    takes_attention_backend = True
    components = {"transformer": trained(Flux2Transformer2DModel), "vae": autoencoder(AutoencoderKLFlux2)}
    block_class_names = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    spreads_tokens = True
    token_plan = FLUX_TOKENS
    # Attention and feed-forward of the double blocks, image and text side, and the fused input of the single ones.
    lora_target_modules = (
        *JOINT_ATTENTION,
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
        "attn.to_qkv_mlp_proj",
    )
    latent_patch = 2
    reads_media = True


class Flux2DevBundle(Flux2Bundle):
    """FLUX.2 dev: transformer, VAE, Mistral 3 and its tokenizer. The encoder's vision tower is not asked."""

    family = "FLUX.2 dev"
    pipeline_classes = ("Flux2Pipeline",)
    components = {
        **Flux2Bundle.components,
        "text_encoder": text_encoder(Mistral3ForConditionalGeneration),
        "tokenizer": processor(),
    }
    text_class = Flux2TextEncoders
    recipe_rules = "unirl.models.flux2.rules"
    # What its authors recommend at most; the stock pipeline sets no limit. From memory.
    most_images = 6
    released_guidance = 4.0
    """Value of the guidance input that the stock pipeline takes by default."""

    @property
    def embeds_guidance(self) -> bool:
        """True if the transformer takes its guidance as an input, as the released one does."""
        return bool(self.transformer.config["guidance_embeds"])

    def load_processor(self, name: str) -> Any:  # Any: as in the base
        """The tokenizer of the processor of texts and images, which needs no torchvision without the latter.

        It is read as its file has it: the classes of Llama, which configurations of Mistral name, would build another
        one of its words, which loses spaces.
        """
        path = self.folder.path / name
        try:
            return PreTrainedTokenizerFast.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} has no tokenizer that loads: {error}") from error
