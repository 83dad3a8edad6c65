"""The modules of a Qwen-Image-Edit or -Edit-Plus pipeline folder."""

from __future__ import annotations

from typing import Any, ClassVar

from unirl.models.diffusers_pipeline.components import processor
from unirl.models.experts import RankFollowing
from unirl.models.extras import from_extra
from unirl.models.qwen_image.bundle import QwenImageBundle
from unirl.models.qwen_image_edit.text import QwenImageEditTextEncoders
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import CheckpointError

with from_extra("diffusers"):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


@bounded("bundle")
class QwenImageEditBundle(RankFollowing, QwenImageBundle):
    """Qwen-Image-Edit, see `QwenImageBundle`, with the image processor of its vision-language encoder.

    image_area: pixels, about which the images of a request are resized at their aspect ratio before the VAE reads
    them; condition_area: before the encoder does, whose own limits apply after that. None is what the stock pipeline
    does: 1024 x 1024 for both, and 384 x 384 for the encoder of -Edit-Plus.
    """

    family = "Qwen-Image-Edit"
    pipeline_classes = ("QwenImageEditPipeline",)
    components = {**QwenImageBundle.components, "processor": processor()}
    text_class = QwenImageEditTextEncoders
    text: QwenImageEditTextEncoders
    picture_mark: ClassVar[str] = "<|vision_start|><|image_pad|><|vision_end|>"
    """Stands for each image before the instruction; `{}` is its number, from 1."""
    reads_media = True
    needs_media = True
    most_images = 1
    """Images that a request may bring for a sample."""
    published_condition_area: ClassVar[int] = 1024 * 1024

    # Any: the keywords of DiffusersBundle.
    def __init__(
        self,
        pretrained_model: str,
        *,
        image_area: PositiveInt = 1024 * 1024,
        condition_area: PositiveInt | None = None,
        **options: Any,
    ) -> None:
        self.image_area = image_area
        self.condition_area = self.published_condition_area if condition_area is None else condition_area
        super().__init__(pretrained_model, **options)

    def load_processor(self, name: str) -> Any:  # Any: as in the base
        """The image part of the processor of texts and images, which needs no torchvision."""
        if name != "processor":
            return super().load_processor(name)
        path = self.folder.path / name
        try:
            return Qwen2VLImageProcessorPil.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} has no image processor that loads: {error}") from error

    @property
    def text_options(self) -> dict[str, Any]:  # Any: as in the base
        """The processor of images, which the encoder sees, and what stands for one."""
        return {"image_processor": self.processors["processor"], "picture_mark": self.picture_mark}


class QwenImageEditPlusBundle(QwenImageEditBundle):
    """Qwen-Image-Edit-Plus (-2509, -2511), which takes several images."""

    family = "Qwen-Image-Edit-Plus"
    pipeline_classes = ("QwenImageEditPlusPipeline",)
    picture_mark = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"
    # What the model card recommends; the stock pipeline sets no limit.
    most_images = 3
    published_condition_area = 384 * 384
