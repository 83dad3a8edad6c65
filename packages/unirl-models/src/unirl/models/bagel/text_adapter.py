"""BAGEL as a language model: it thinks before it draws, and answers questions about images.

Legend: N patches of all images, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.layout import Layout
from unirl.models.diffusers_pipeline.references import distinct, pictures_of
from unirl.models.packed.given_images import grids_of
from unirl.models.packed.patches import grid_of, joined_patches, patches_of
from unirl.models.packed.text_adapter import PackedTextAdapter
from unirl.models.text_adapter import require_one_per_text
from unirl.types.conditions import Condition, ImagePatchCondition, PromptCondition
from unirl.types.media import Primitive
from unirl.types.protocols.models import Conditions


class BagelTextAdapter(PackedTextAdapter):
    """A prompt is [system turn, images, turn of the text, begin of a turn]; the model writes that turn.

    system_prompt: text of the first turn; the published code asks there for a thought between <think> and </think>.
        None leaves the turn out. An image is seen by the vision tower alone, as the published code does for answers.
    """

    bundle: BagelBundle

    def __init__(self, bundle: BagelBundle, *, system_prompt: str | None = None) -> None:
        super().__init__(bundle, chat_template=False)
        self._system_ids = [] if system_prompt is None else bundle.turn(system_prompt)

    def prompts_of(
        self, texts: Sequence[str], primitives: Mapping[str, Primitive]
    ) -> tuple[list[list[int]], dict[str, Condition]]:
        """With the slot "image" also {"images": ImagePatchCondition}."""
        samples = pictures_of(primitives, self.bundle.family, fewest=0, most=None)
        require_one_per_text(len(texts) if samples is None else len(samples), len(texts))
        pictures, places = distinct(samples or [[]] * len(texts))
        sides, vision = self.bundle.vision_sides, self.bundle.config.vision
        seen = [sides.resized(picture) * 2 - 1 for picture in pictures]
        patches = [patches_of(picture, vision.patch_size) for picture in seen]
        grids = [grid_of(picture, vision.patch_size) for picture in seen]
        prompts = [
            [
                *self._system_ids,
                *(token for place in sample for token in self.bundle.marks.image(len(patches[place]))),
                *self.prompt_tokens(text),
            ]
            for text, sample in zip(texts, places, strict=True)
        ]
        if samples is None:
            return prompts, {}
        return prompts, {"images": joined_patches(patches, grids, places, vision.patch_width, self.bundle.device)}

    def prompt_tokens(self, text: str) -> list[int]:
        """The turn of a text, and the begin of the turn that is written."""
        return [*self.bundle.turn(text), self.bundle.marks.text_start]

    def positions(self, conditions: Conditions, lengths: Sequence[int]) -> list[Tensor]:
        """See `TextAdapter.positions`: all tokens of an image have one position."""
        device = self.bundle.device
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        places = []
        for prompt, length in zip(prompts, lengths, strict=True):
            of_prompt = Layout.positions_of(self.bundle.marks.segments(prompt.tolist()), 0)
            following = of_prompt[-1] + 1 + torch.arange(length - len(prompt))
            places.append(torch.cat([of_prompt, following]).to(device))
        return places

    def model_inputs(self, conditions: Conditions) -> dict[str, Tensor]:
        """Patches and grids of all images in the order of the prompts; nothing where there are none."""
        images = conditions.get("images")
        if not isinstance(images, ImagePatchCondition) or len(images.patches) == 0:
            return {}
        return {"patches": images.patches, "grids": grids_of(images)}
