"""BAGEL as a language model: it thinks before it draws, and answers questions about images.

Legend: N patches of all images, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.layout import segment_positions
from unirl.models.diffusers_pipeline.references import distinct, pictures_of
from unirl.models.packed.patches import grid_of, joined_patches, patches_of
from unirl.models.text_adapter import TextAdapter
from unirl.types.conditions import Condition, ImagePatchCondition, PromptCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive, Texts
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import ARSamplingParams


class BagelTextAdapter(TextAdapter):
    """A prompt is [system turn, images, turn of the text, begin of a turn]; the model writes that turn.

    system_prompt: text of the first turn; the published code asks there for a thought between <think> and </think>.
        None leaves the turn out. An image is seen by the vision tower alone, as the published code does for answers.
    """

    bundle: BagelBundle

    def __init__(self, bundle: BagelBundle, *, system_prompt: str | None = None) -> None:
        super().__init__(bundle, chat_template=False)
        self._system_ids = [] if system_prompt is None else bundle.turn(system_prompt)

    def encode(self, primitives: Mapping[str, Primitive], params: ARSamplingParams) -> dict[str, Condition]:
        """{"prompt": PromptCondition} of B texts and, with the slot "image", {"images": ImagePatchCondition}.

        Raises ConfigError if slots are missing or not understood, or a prompt with its images leaves no room for
        max_new_tokens.
        """
        texts = primitives.get("text")
        if not isinstance(texts, Texts) or set(primitives) - {"text", "image"}:
            found = {name: type(value).__name__ for name, value in primitives.items()}
            raise ConfigError(f"{type(self).__name__} reads 'text': Texts and 'image', the request has {found}")
        samples = pictures_of(primitives, self.bundle.family, fewest=0, most=None)
        if samples is not None and len(samples) != len(texts.texts):
            raise ConfigError(f"the slot 'image' has {len(samples)} samples, 'text' {len(texts.texts)}")
        device, marks = self.bundle.device, self.bundle.marks
        pictures, places = distinct(samples or [[]] * len(texts.texts))
        sides = self.bundle.vision_sides
        seen = [sides.resized(picture) * 2 - 1 for picture in pictures]
        size = self.bundle.config.vision.patch_size
        patches, grids = [patches_of(picture, size) for picture in seen], [grid_of(picture, size) for picture in seen]
        prompts = [
            [
                *self._system_ids,
                *(token for place in sample for token in marks.image(len(patches[place]))),
                *self.prompt_tokens(text),
            ]
            for text, sample in zip(texts.texts, places, strict=True)
        ]
        self.check_context(
            [len(prompt) for prompt in prompts],
            params.max_new_tokens,
            num_image_tokens=[prompt.count(marks.visual) for prompt in prompts],
        )
        conditions: dict[str, Condition] = {
            "prompt": PromptCondition.pack(tokens=[torch.tensor(prompt, device=device) for prompt in prompts])
        }
        if samples is not None:
            conditions["images"] = joined_patches(patches, grids, places, self.bundle.config.vision.patch_width, device)
        return conditions

    def prompt_tokens(self, text: str) -> list[int]:
        """The turn of a text, and the begin of the turn that is written."""
        return [*self.bundle.turn(text), self.bundle.marks.text_start]

    def positions(self, conditions: Conditions, lengths: Sequence[int]) -> list[Tensor]:
        """See `TextAdapter.positions`: all tokens of an image have one position."""
        device = self.bundle.device
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        places = []
        for prompt, length in zip(prompts, lengths, strict=True):
            of_prompt = segment_positions(self.bundle.marks.segments(prompt.tolist()), 0)
            following = of_prompt[-1] + 1 + torch.arange(length - len(prompt))
            places.append(torch.cat([of_prompt, following]).to(device))
        return places

    def model_inputs(self, conditions: Conditions) -> dict[str, Tensor]:
        """Patches and grids of all images in the order of the prompts; nothing where there are none."""
        images = conditions.get("images")
        if not isinstance(images, ImagePatchCondition) or len(images.patches) == 0:
            return {}
        grids = [grid[1:] for sample in images.grids for grid in sample]
        return {"patches": images.patches, "grids": torch.tensor(grids, device=images.patches.device)}
