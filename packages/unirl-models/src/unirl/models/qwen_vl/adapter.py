"""How Qwen2.5-VL and Qwen3-VL read prompts with images.

Legend: N patches, D numbers of a patch, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.text_adapter import TextAdapter
from unirl.types.conditions import Condition, ImagePatchCondition, PromptCondition
from unirl.types.errors import ConfigError
from unirl.types.media import ImageLists, Images, Primitive, Texts
from unirl.types.protocols import Conditions
from unirl.types.sampling import ARSamplingParams

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
"""One image in a prompt without chat template, as the template writes it."""

Grid = tuple[int, int, int]


class QwenVLAdapter(TextAdapter):
    """Qwen2.5-VL or Qwen3-VL, see `TextAdapter`. The images of a prompt stand before its text.

    Images are rounded to 8 bits first, as they would be on their way to an engine elsewhere.
    """

    bundle: QwenVLBundle

    def __init__(
        self, bundle: QwenVLBundle, *, chat_template: bool | None = None, system_prompt: str | None = None
    ) -> None:
        super().__init__(bundle, chat_template=chat_template, system_prompt=system_prompt)

    def encode(self, primitives: Mapping[str, Primitive], params: ARSamplingParams) -> dict[str, Condition]:
        """{"prompt": PromptCondition} of B texts and, with the slot "image", {"images": ImagePatchCondition}.

        "image" holds Images, one a sample, or ImageLists. Raises ConfigError where slots are missing or not
        understood, or a prompt with its images leaves no room for max_new_tokens.
        """
        texts, images = primitives.get("text"), primitives.get("image")
        if not isinstance(texts, Texts) or set(primitives) - {"text", "image"}:
            found = {name: type(value).__name__ for name, value in primitives.items()}
            raise ConfigError(f"{type(self).__name__} reads 'text': Texts and 'image', the request has {found}")
        if images is None:
            return super().encode(primitives, params)
        if isinstance(images, Images):
            pictures = [[pixels] for pixels in images.pixels]
        elif isinstance(images, ImageLists):
            pictures = images.images
        else:
            raise ConfigError(f"the slot 'image' must hold Images or ImageLists, got {type(images).__name__}")
        patches, grids = zip(*(self._patches(each) for each in pictures), strict=True)
        prompts = [
            self._expanded(self.prompt_tokens(text, num_images=len(grid)), grid)
            for text, grid in zip(texts.texts, grids, strict=True)
        ]
        self.check_context([len(prompt) for prompt in prompts], params.max_new_tokens)
        device = self.bundle.device
        return {
            "prompt": PromptCondition.pack(tokens=[torch.tensor(prompt, device=device) for prompt in prompts]),
            "images": ImagePatchCondition.pack(patches=[each.to(device) for each in patches], grids=list(grids)),
        }

    def prompt_tokens(self, text: str, *, num_images: int = 0) -> list[int]:
        """Tokens of one prompt, with one placeholder an image."""
        if not self.uses_template:
            return super().prompt_tokens(PLACEHOLDER * num_images + text)
        return self.templated([*({"type": "image"} for _ in range(num_images)), {"type": "text", "text": text}])

    def positions(self, conditions: Conditions, lengths: Sequence[int]) -> list[Tensor]:
        """[3, n] positions of each sample: time, row and column of image tokens; text goes on behind the largest."""
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        images = conditions.get("images")
        grids = images.grids if isinstance(images, ImagePatchCondition) else [()] * len(prompts)
        return [self._positions(*each) for each in zip(prompts, grids, lengths, strict=True)]

    def model_inputs(self, conditions: Conditions) -> dict[str, Tensor]:
        """Patches and grids of all images in the order of the prompts; nothing where there are none."""
        images = conditions.get("images")
        if not isinstance(images, ImagePatchCondition) or len(images.patches) == 0:
            return {}
        grids = [grid for sample in images.grids for grid in sample]
        return {
            "pixel_values": images.patches,
            "image_grid_thw": torch.tensor(grids, dtype=torch.long, device=images.patches.device),
        }

    def _patches(self, images: Sequence[Tensor]) -> tuple[Tensor, tuple[Grid, ...]]:
        """Patches [N, D] of one sample's images and their grids."""
        if not images:
            vision = self.bundle.model.config.vision_config
            width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            return torch.zeros(0, width), ()
        pixels = [(image.clamp(0, 1) * 255).round().to("cpu", torch.uint8).numpy() for image in images]
        out = self.bundle.image_processor(images=pixels, return_tensors="pt", input_data_format="channels_first")
        frames_rows_columns: list[Any] = out["image_grid_thw"].tolist()  # Any: nested numbers of tolist
        return out["pixel_values"], tuple((t, h, w) for t, h, w in frames_rows_columns)

    def _expanded(self, tokens: list[int], grids: tuple[Grid, ...]) -> list[int]:
        """Every placeholder as often as its image has tokens."""
        placeholder = self.bundle.image_token_id
        if tokens.count(placeholder) != len(grids):
            raise ConfigError(
                f"a prompt with {len(grids)} images has {tokens.count(placeholder)} image placeholders. Remove them "
                "from its text, or correct the chat template."
            )
        sizes = iter([t * h * w // self.bundle.patches_per_token for t, h, w in grids])
        return [copy for token in tokens for copy in ([token] * next(sizes) if token == placeholder else [token])]

    def _positions(self, prompt: Tensor, grids: tuple[Grid, ...], length: int) -> Tensor:
        if grids:
            places, _ = self.bundle.model.model.get_rope_index(
                prompt[None],
                mm_token_type_ids=(prompt == self.bundle.image_token_id).int()[None],
                image_grid_thw=torch.tensor(grids, dtype=torch.long, device=prompt.device),
            )
            places = places[:, 0]
        else:
            places = torch.arange(len(prompt), device=prompt.device).expand(3, -1)
        behind = places.max() + 1 + torch.arange(length - len(prompt), device=prompt.device)
        return torch.cat([places, behind.expand(3, -1)], dim=1)
