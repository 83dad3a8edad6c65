"""The modules of an LTX-2 pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, frozen, processor, text_encoder, trained
from unirl.models.extras import from_extra
from unirl.models.loading import PipelineFolder
from unirl.models.ltx2.text import LTX2TextEncoders
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
    from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
    from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
    from transformers import Gemma3ForConditionalGeneration

BUNDLES = {"2": "unirl.models.ltx2.bundle.LTX2Bundle", "2.3": "unirl.models.ltx23.bundle.LTX23Bundle"}
"""What loads each version."""


class LTX2Bundle(DiffusersBundle):
    """Transformer, both VAEs, vocoder, Gemma 3, its connectors and tokenizer, see `DiffusersBundle`."""

    family = "LTX-2"
    version: ClassVar[str] = "2"
    """Version of the checkpoints that it loads; all name one pipeline class."""
    takes_attention_backend = True
    makes_sound = True
    pipeline_classes = ("LTX2Pipeline",)
    components = {
        "transformer": trained(LTX2VideoTransformer3DModel),
        "vae": autoencoder(AutoencoderKLLTX2Video),
        "audio_vae": autoencoder(AutoencoderKLLTX2Audio),
        "vocoder": frozen(LTX2Vocoder),
        "text_encoder": text_encoder(Gemma3ForConditionalGeneration),
        # Between Gemma and the transformer; they see the text alone, so their output is what is cached.
        "connectors": text_encoder(LTX2TextConnectors),
        "tokenizer": processor(),
    }
    text_class = LTX2TextEncoders
    block_class_names = ("LTX2VideoTransformerBlock",)
    # Self attention, attention to the text and to the other medium, of video and audio.
    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0")
    latent_divisor = 32
    latent_patch = 1
    frame_divisor = 8
    decodes_at_once = True

    def check_index(self) -> None:
        """Raises ConfigError for another version, a transformer that packs its latents, and a VAE that denoises while
        it decodes."""
        found = version_of(self.folder)
        if found not in BUNDLES:
            raise ConfigError(
                f"{self.pretrained_model} is LTX-{found} (texts by Gemma 4, read alike at every noise level); "
                f"LTX-{' and LTX-'.join(BUNDLES)} are known. Use one of these."
            )
        if found != self.version:
            raise ConfigError(
                f"{self.pretrained_model} is LTX-{found}; {type(self).__name__} loads LTX-{self.version}. Set "
                f"bundle._target_: {BUNDLES[found]}."
            )
        transformer = self.folder.config("transformer")
        patches = {name: transformer[name] for name in transformer if name.endswith(("patch_size", "patch_size_t"))}
        if any(patch != 1 for patch in patches.values()):
            raise ConfigError(
                f"the transformer of {self.pretrained_model} has {patches}; this family knows patches of 1."
            )
        if self.folder.config("vae").get("timestep_conditioning"):
            raise ConfigError(
                f"the VAE of {self.pretrained_model} adds noise while it decodes (timestep_conditioning: true), so a "
                "latent is not an image by itself. Use a checkpoint whose VAE does not."
            )

    @cached_property
    def connectors_config(self) -> dict[str, Any]:  # Any: JSON values
        """Configuration of the connectors, which are freed with the text encoder."""
        return self.folder.config("connectors")

    @property
    def audio_vae(self) -> Any:  # Any: as in `DiffusersBundle.load`
        """The autoencoder of spectrograms."""
        return self.modules["audio_vae"]

    @property
    def vocoder(self) -> Any:  # Any: as in `DiffusersBundle.load`
        """Waveforms of spectrograms."""
        return self.modules["vocoder"]


def version_of(folder: PipelineFolder) -> str:
    """Version of a checkpoint, of which no file of the folder has the name: "2", "2.3" or "2.5"."""
    transformer = folder.config("transformer")
    is_gemma4 = str(folder.class_of("text_encoder")).startswith("Gemma4")
    if is_gemma4 or folder.class_of("duration_head") or not transformer.get("use_prompt_adaln_single", True):
        return "2.5"
    return "2.3" if transformer.get("cross_attn_mod") or transformer.get("audio_cross_attn_mod") else "2"
