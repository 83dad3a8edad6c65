"""The modules of a Wan pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from unirl.models.bundle import LoRASettings
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, frozen, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.export import write_lora
from unirl.models.diffusers_pipeline.lora_targets import SELF_AND_CROSS_ATTENTION
from unirl.models.experts import RankFollowing
from unirl.models.extras import from_extra
from unirl.models.token_plan import IMAGE, TokenPlan
from unirl.models.wan.text import WanTextEncoders
from unirl.types.bounds import OpenUnitInterval, bounded
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan_animate import WanAnimateTransformer3DModel
    from diffusers.models.transformers.transformer_wan_vace import WanVACETransformer3DModel
    from transformers import CLIPVisionModel, UMT5EncoderModel


@bounded("bundle")
class WanBundle(RankFollowing, DiffusersBundle):
    """Transformers, VAE, UMT5 and tokenizer of a checkpoint that makes videos of text, see `DiffusersBundle`.

    boundary_ratio: noise level below which the second transformer of Wan 2.2 takes over; None takes the checkpoint's.
    Exports keep the checkpoint's in any case.
    Raises ConfigError if it is outside (0, 1), or if there is a second transformer without a boundary or a boundary
    without it.
    """

    family = "Wan"
    takes_attention_backend = True
    pipeline_classes = ("WanPipeline",)
    components = {
        "transformer": trained(WanTransformer3DModel),
        "transformer_2": trained(WanTransformer3DModel, is_optional=True),
        "vae": autoencoder(AutoencoderKLWan),
        "text_encoder": text_encoder(UMT5EncoderModel),
        "tokenizer": processor(),
    }
    text_class = WanTextEncoders
    block_class_names = ("WanTransformerBlock",)
    spreads_tokens = True
    # The text, which is attended to by every token, stays whole; timesteps may be of tokens (TI2V).
    token_plan = TokenPlan(
        arguments={"": {"timestep": IMAGE}, "blocks.0": {"hidden_states": IMAGE}},
        outputs={"rope": {0: IMAGE, 1: IMAGE}},
        attention={"blocks.*.attn1": ("image",)},
        whole_again={"proj_out": IMAGE},
    )
    # Self attention and attention to the text.
    lora_target_modules = SELF_AND_CROSS_ATTENTION
    frame_divisor = 4

    # Any: the keywords of DiffusersBundle.
    def __init__(
        self, pretrained_model: str, *, boundary_ratio: OpenUnitInterval | None = None, **options: Any
    ) -> None:
        self._boundary_ratio = boundary_ratio
        super().__init__(pretrained_model, **options)

    @property
    def boundary(self) -> float | None:
        """Noise level below which `transformer_2` takes over; None for one transformer."""
        return self.folder.index.get("boundary_ratio") if self._boundary_ratio is None else self._boundary_ratio

    @property
    def masks_timesteps(self) -> bool:
        """True if frames that are given have a timestep of 0 (Wan 2.2 TI2V-5B) instead of their own channels."""
        return bool(self.folder.index.get("expand_timesteps"))

    def write_lora(self, folder: str, lora_state: Mapping[str, Mapping[str, Tensor]], settings: LoRASettings) -> None:
        """One file for `load_lora_weights(folder)`, and that of the second expert in `folder/transformer_2` for
        `load_lora_weights(folder/transformer_2, load_into_transformer_2=True)`, which knows one name of a model."""
        self._check_components(lora_state)
        for name, state in lora_state.items():
            target = folder if name == "transformer" else str(Path(folder) / name)
            write_lora(target, {"transformer": state}, settings)

    def check_index(self) -> None:
        """Raises ConfigError for a boundary without a second transformer, the reverse, or one outside (0, 1)."""
        has_second = self.folder.class_of("transformer_2") is not None
        if has_second != (self.boundary is not None):
            raise ConfigError(
                f"{self.folder.path} has {'a' if has_second else 'no'} transformer_2 and boundary_ratio = "
                f"{self.boundary}: two experts need both, one transformer neither. Mend model_index.json or set "
                "bundle.boundary_ratio."
            )
        if self.boundary is not None and not 0 < self.boundary < 1:
            raise ConfigError(
                f"boundary_ratio = {self.boundary} of {self.folder.path} must lie in (0, 1). Mend model_index.json or "
                "set bundle.boundary_ratio."
            )


class WanImageBundle(WanBundle):
    """A checkpoint that makes videos which begin with a given image, and may end with another. See `WanBundle`.

    Wan 2.1 (with a CLIP encoder of images), its first-last-frame model, Wan 2.2 A14B, and TI2V-5B.
    """

    pipeline_classes = ("WanImageToVideoPipeline", "WanPipeline")
    components = {
        **WanBundle.components,
        # Wan 2.1's releases name the class with a projection, whose features before it are read.
        "image_encoder": frozen(CLIPVisionModel, "CLIPVisionModelWithProjection", is_optional=True),
        "image_processor": processor(is_optional=True),
    }
    reads_media = True
    needs_media = True
    most_images = 2

    @property
    def num_images(self) -> tuple[int, int]:
        """Fewest and most images of a sample: the first frame, and the last where the model reads one."""
        config = self.transformer.config
        if config["image_dim"] is None:
            return (1, 1) if self.masks_timesteps else (1, 2)
        return (1, 1) if config["pos_embed_seq_len"] is None else (2, 2)

    def check_index(self) -> None:
        """Raises ConfigError, too, for a checkpoint of text alone and for a CLIP encoder that is missing."""
        super().check_index()
        transformer, vae = self.folder.config("transformer"), self.folder.config("vae")
        # A mask of the frames of one latent frame, and the latents of what is given.
        channels = 2 * vae.get("z_dim", 16) + vae.get("scale_factor_temporal", 4)
        if not self.masks_timesteps and transformer["in_channels"] != channels:
            raise ConfigError(
                f"{self.folder.path} makes videos of text alone: its transformer reads {transformer['in_channels']} "
                f"channels, one of images {channels}. Use a checkpoint of image to video, or WanBundle."
            )
        has_clip = all(self.folder.class_of(name) for name in ("image_encoder", "image_processor"))
        if transformer.get("image_dim") is not None and not has_clip:
            raise ConfigError(
                f"{self.folder.path} has no image_encoder and image_processor, whose features its transformer reads "
                f"(image_dim = {transformer['image_dim']}). Fetch the folder again."
            )


class WanVACEBundle(WanBundle):
    """A checkpoint that fills a video where a mask says so, and follows reference images. See `WanBundle`."""

    pipeline_classes = ("WanVACEPipeline",)
    components = {
        **WanBundle.components,
        "transformer": trained(WanVACETransformer3DModel),
        "transformer_2": trained(WanVACETransformer3DModel, is_optional=True),
    }
    block_class_names = ("WanTransformerBlock", "WanVACETransformerBlock")
    spreads_tokens = False
    token_plan = None
    reads_media = True


class WanAnimateBundle(WanImageBundle):
    """A checkpoint that moves a character of an image as a pose video and a face video say. See `WanImageBundle`."""

    family = "Wan Animate"
    needed_videos = ("pose", "face")
    pipeline_classes = ("WanAnimatePipeline",)
    components = {**WanImageBundle.components, "transformer": trained(WanAnimateTransformer3DModel)}
    spreads_tokens = False
    token_plan = None
    most_images = 1

    @property
    def face_size(self) -> int:
        """Pixels of a side of the face video."""
        return self.transformer.config["motion_encoder_size"]
