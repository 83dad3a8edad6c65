"""The model, tokenizer and image processor of Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.extras import from_extra
from unirl.models.token_scores import CHUNK_LOGITS
from unirl.types.bounds import PositiveInt, Seed, bounded
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.protocols.models import RecomputeContexts, TokenExchange

with from_extra("transformers"):
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


@bounded("bundle")
class QwenVLBundle(CausalLMBundle):
    """Qwen2.5-VL or Qwen3-VL, see `CausalLMBundle`; of Qwen3.5: `unirl.models.qwen3_5`.

    freeze_vision: whether the vision tower keeps its weights; LoRA leaves it alone in any case.
    min_pixels, max_pixels: images are resized, at their aspect ratio, to so many pixels; None takes the checkpoint's.
    """

    reads_media: ClassVar[bool] = True
    reads_images_in_turns: ClassVar[bool] = True
    cuts_rows_inside: ClassVar[bool] = True
    cuts_layers: ClassVar[bool] = False
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl", "qwen3_vl")
    auto_class: ClassVar[Any] = transformers.AutoModelForImageTextToText  # Any: see the base

    def __init__(
        self,
        pretrained_model: str,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        *,
        freeze_vision: bool = True,
        min_pixels: PositiveInt | None = None,
        max_pixels: PositiveInt | None = None,
        chunk_logits: PositiveInt = CHUNK_LOGITS,
        random_weights: Seed | None = None,
        defers_weights: bool = False,
    ) -> None:
        super().__init__(
            pretrained_model,
            dtype,
            device,
            chunk_logits=chunk_logits,
            random_weights=random_weights,
            defers_weights=defers_weights,
        )
        self.vision_tower.requires_grad_(not freeze_vision)
        self.alias_offset: int = self.model.get_input_embeddings().num_embeddings
        """An id beyond the vocabulary by this much is embedded as the id itself, and is no placeholder to the model."""
        self.model.get_input_embeddings().register_forward_pre_hook(_embed_aliases)
        self.image_processor = self._load_image_processor(min_pixels, max_pixels)
        vision = self.model.config.vision_config
        for name, expected in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.spatial_merge_size),
            ("temporal_patch_size", vision.temporal_patch_size),
        ):
            found = getattr(self.image_processor, name)
            if found != expected:
                raise CheckpointError(
                    f"{self.folder.path}: the image processor has {name} = {found}, the vision tower {expected}. Their "
                    "files are of different models: fetch the folder again."
                )

    @property
    def vision_tower(self) -> nn.Module:
        """What makes tokens of patches."""
        return self.model.model.visual

    @property
    def decoder(self) -> nn.Module:
        """What reads the embeddings of words and media."""
        return self.model.model.language_model

    def spread_tokens(self, exchange: TokenExchange) -> RecomputeContexts:
        """As `CausalLMBundle.spread_tokens`; every rank runs the encoders of media, and puts what they make into the
        whole row, of which the decoder computes this rank's part."""
        contexts = super().spread_tokens(exchange)
        self.decoder.register_forward_pre_hook(_own_part, with_kwargs=True)
        return contexts

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Tokens that stand for media in a prompt."""
        return (self.image_token_id,)

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The decoder layers of both families. The vision tower stays whole: a rank whose batch has no image does not
        run it, so its blocks must not be gathered one by one."""
        return ("Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer")

    @property
    def image_token_id(self) -> int:
        """The placeholder that stands for one merged patch of an image."""
        return int(self.model.config.image_token_id)

    @property
    def patches_per_token(self) -> int:
        """Patches that are merged into one token."""
        return int(self.model.config.vision_config.spatial_merge_size) ** 2

    def _set_attention(self, name: str) -> None:
        # The vision tower has its own windows and is not causal.
        self.model.set_attn_implementation({"text_config": name})

    def _load_image_processor(self, min_pixels: int | None, max_pixels: int | None) -> Qwen2VLImageProcessorPil:
        try:
            processor = Qwen2VLImageProcessorPil.from_pretrained(self.folder.path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder.path} has no image processor that loads: {error}") from error
        size = {
            "shortest_edge": processor.size["shortest_edge"] if min_pixels is None else min_pixels,
            "longest_edge": processor.size["longest_edge"] if max_pixels is None else max_pixels,
        }
        if not 0 < size["shortest_edge"] <= size["longest_edge"]:
            raise ConfigError(
                f"min_pixels = {size['shortest_edge']} must be above 0 and at most max_pixels = {size['longest_edge']}"
            )
        processor.size = size
        return processor


def _own_part(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:  # Any: arguments of the decoder
    """Cut a packed row that ranks share: this rank's embeddings and positions, and what of images goes to layers."""
    packing = kwargs.get("packing")
    if packing is None or packing.exchange is None:
        return None
    own = packing.exchange.own
    cut = {"inputs_embeds": own(kwargs["inputs_embeds"], 1), "position_ids": own(kwargs["position_ids"], -1)}
    is_image, of_layers = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if is_image is not None and of_layers is not None:
        counts = [int(part.sum()) for part in is_image.split(packing.exchange.lengths(is_image.shape[1]), 1)]
        cut["visual_pos_masks"] = own(is_image, 1)
        cut["deepstack_visual_embeds"] = [each.split(counts)[packing.exchange.rank] for each in of_layers]
    return args, kwargs | cut


def _embed_aliases(embedding: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    assert isinstance(embedding, nn.Embedding)  # noqa: S101 - what every Qwen-VL has
    return (inputs[0] % embedding.num_embeddings, *inputs[1:])
