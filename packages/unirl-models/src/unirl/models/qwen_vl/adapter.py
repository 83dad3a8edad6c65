"""How Qwen2.5-VL and Qwen3-VL read prompts with images.

Legend: N patches, D numbers of a patch, P tokens of a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.images import Grid, expanded, vision_patches
from unirl.models.text_adapter import TextAdapter, require_one_per_text
from unirl.types.conditions import Bridge, Condition, ImagePatchCondition, PromptCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import ImageLists, Images, Primitive, shown_pixels
from unirl.types.messages import Message, ShownImage
from unirl.types.protocols.models import Conditions

PLACEHOLDERS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
}
"""One of each kind in a prompt without chat template, as the template writes it. "<image>" is where one stands in a
text that says so; data sets of questions are written with it."""


Range = tuple[int, int]
"""Begin and end."""


def _begins(tokens: Sequence[int], placeholder: int) -> tuple[int, ...]:
    """Where each run of placeholders begins."""
    pairs = enumerate(zip([None, *tokens], tokens, strict=False))
    return tuple(place for place, (before, token) in pairs if token == placeholder != before)


def pictures_of(images: Primitive, num_samples: int) -> Sequence[Sequence[Tensor]]:
    """The images of each sample in the slot "image". Raises ConfigError for another kind or number."""
    if isinstance(images, Images):
        pictures: Sequence[Sequence[Tensor]] = [[pixels] for pixels in images.in_floats().pixels]
    elif isinstance(images, ImageLists):
        pictures = images.images
    else:
        raise ConfigError(f"the slot 'image' must hold Images or ImageLists, got {type(images).__name__}")
    require_one_per_text(len(pictures), num_samples)
    return pictures


class QwenVLAdapter(TextAdapter):
    """Qwen2.5-VL or Qwen3-VL, see `TextAdapter`.

    The images of a prompt stand where its text has "<image>", before the text where it has none.
    Images are rounded to 8 bits first, as they would be on their way to an engine elsewhere.
    """

    bundle: QwenVLBundle
    read_media = frozenset({"image"})
    reads = "'text': Texts and 'image'"

    def prompts_of(
        self, texts: Sequence[str], primitives: Mapping[str, Primitive]
    ) -> tuple[list[list[int]], dict[str, Condition]]:
        """With the slot "image" also {"images": ImagePatchCondition}.

        "image" holds Images, one per sample, or ImageLists. Equal images are processed once. Raises DataError for an
        image that cannot be resized.
        """
        images = primitives.get("image")
        if images is None:
            return super().prompts_of(texts, primitives)
        condition = self.images_of(pictures_of(images, len(texts)))
        prompts = [
            self.with_images(self.prompt_with(text, {"image": len(grid)}), grid)
            for text, grid in zip(texts, condition.grids, strict=True)
        ]
        token = self.bundle.image_token_id
        places = [_begins(prompt, token) for prompt in prompts]
        return prompts, {"images": condition.replace(places=places)}

    @property
    def media_tokens(self) -> frozenset[int]:
        """Placeholders of media."""
        return frozenset(self.bundle.placeholder_ids)

    def shown(self, image: ShownImage) -> Bridge:
        """As `TextAdapter.shown`, with the tokens that templates write around an image of a prompt."""
        condition = self.images_of([[shown_pixels(image)]])
        tokens = self.bundle.tokenizer(PLACEHOLDERS["image"], add_special_tokens=False)["input_ids"]
        tokens = self.with_images(tokens, condition.grids[0])
        return Bridge(tokens, condition.replace(places=[_begins(tokens, self.bundle.image_token_id)]))

    def num_image_tokens(self, prompt: Sequence[int]) -> int:
        return prompt.count(self.bundle.image_token_id)

    def _opening(self, messages: Sequence[Message]) -> Bridge:
        shown = [shown_pixels(image) for each in messages for image in each.images]
        if not shown:
            return super()._opening(messages)
        contents = [self._content(each.content, {"image": len(each.images)}) for each in messages]
        if self.uses_template:
            pairs = zip(messages, contents, strict=True)
            tokens = self._chat_template.opening([{"role": each.role, "content": content} for each, content in pairs])
        else:
            tokens = self.prompt_tokens("".join(map(str, contents)))
        condition = self.images_of([shown])
        tokens = self.with_images(tokens, condition.grids[0])
        return Bridge(tokens, condition.replace(places=[_begins(tokens, self.bundle.image_token_id)]))

    def prompt_with(self, text: str, shown: Mapping[str, int]) -> list[int]:
        """Tokens of one prompt, with one placeholder for each of what it shows; shown: number by kind."""
        content = self._content(text, shown)
        return self.prompt_tokens(content) if isinstance(content, str) else self.templated(content)

    def _content(self, text: str, shown: Mapping[str, int]) -> str | list[dict[str, str]]:
        """A message as the chat template takes it, and without a template its text with placeholders."""
        marks = {f"<{kind}>": kind for kind, count in shown.items() if count}
        if not marks:
            return text
        parts = re.split("(" + "|".join(marks) + ")", text)
        before: list[str] = []
        for mark, kind in marks.items():
            found = parts.count(mark)
            if found not in (0, shown[kind]):
                raise ConfigError(
                    f"a prompt with {shown[kind]} {kind}s says {mark} {found} times: {text[:80]!r}. Mark each {kind} "
                    "once, or none (they then stand before the text)."
                )
            before += [] if found else [mark] * shown[kind]
        ordered = [part for part in (*before, *parts) if part]
        if not self.uses_template:
            return "".join(PLACEHOLDERS[marks[part]] if part in marks else part for part in ordered)
        return [{"type": marks[part]} if part in marks else {"type": "text", "text": part} for part in ordered]

    def with_images(self, tokens: list[int], grids: tuple[Grid, ...]) -> list[int]:
        """A prompt with as many placeholders as its images take."""
        return expanded(tokens, grids, self.bundle.image_token_id, self.bundle.patches_per_token)

    def positions(self, conditions: Conditions, lengths: Sequence[int]) -> list[Tensor]:
        """[3, n] positions of each sample: time, row and column of image tokens; text continues after the largest."""
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        images = conditions.get("images")
        grids = images.grids if isinstance(images, ImagePatchCondition) else [()] * len(prompts)
        later = self._later(conditions, prompts)
        tokens = [int((prompt == self.bundle.image_token_id).sum()) for prompt in prompts]
        taken = [
            sum(map(self._num_tokens_of, sample[: len(sample) - len(behind)]))
            for sample, behind in zip(grids, later, strict=True)
        ]
        if tokens != taken:
            row = next(i for i, pair in enumerate(zip(tokens, taken, strict=True)) if pair[0] != pair[1])
            raise ContractError(
                f"the prompt of sample {row} has {tokens[row]} image tokens, but its images {grids[row]} (frames, "
                f"rows, columns of patches) take {taken[row]}. Prompt and images must come from one encoding."
            )
        known: dict[Hashable, Tensor] = {}
        places = []
        for prompt, sample, behind, length in zip(prompts, grids, later, lengths, strict=True):
            key = (tuple(prompt.tolist()), sample, behind)
            if key not in known:
                known[key] = self._seen_positions(prompt, sample, behind)
            first = known[key][:, :length]
            rest = known[key].max() + 1 + torch.arange(length - first.shape[1], device=prompt.device)
            places.append(torch.cat([first, rest.expand(3, -1)], dim=1))
        return places

    def _later(self, conditions: Conditions, prompts: Sequence[Tensor]) -> list[tuple[Range, ...]]:
        """Begin and end, among the tokens of its sample, of each image that stands behind the prompt."""
        images = conditions.get("images")
        if not isinstance(images, ImagePatchCondition) or images.places is None:
            return [()] * len(prompts)
        return [
            tuple(
                (place, place + self._num_tokens_of(grid))
                for place, grid in zip(places, grids, strict=True)
                if place >= len(prompt)
            )
            for prompt, places, grids in zip(prompts, images.places, images.grids, strict=True)
        ]

    def _num_tokens_of(self, grid: Grid) -> int:
        frames, rows, columns = grid
        return frames * rows * columns // self.bundle.patches_per_token

    def as_read(self, conditions: Conditions, completions: Sequence[Tensor]) -> list[Tensor]:
        """See `TextAdapter.as_read`: a placeholder that no image stands for goes by an alias that the embedding alone
        understands, since the model would look for an image to put there."""
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        read = []
        for prompt, completion, later in zip(prompts, completions, self._later(conditions, prompts), strict=True):
            placeholders = torch.tensor(self.bundle.placeholder_ids, device=completion.device)
            is_written = torch.isin(completion, placeholders)
            for start, end in later:
                own = slice(start - len(prompt), end - len(prompt))
                if not bool((completion[own] == self.bundle.image_token_id).all()) or own.stop > len(completion):
                    raise ContractError(
                        f"an image should stand at the tokens {start} to {end} of its sample, which hold other tokens. "
                        "Tokens and images must come from one conversation."
                    )
                is_written[own] = False
            read.append(torch.where(is_written, completion + self.bundle.alias_offset, completion))
        return read

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

    def images_of(self, samples: Sequence[Sequence[Tensor]]) -> ImagePatchCondition:
        """Patches and grids of each sample's images, on the model's device."""
        vision = self.bundle.model.config.vision_config
        nothing = torch.zeros(0, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
        known: dict[tuple[tuple[int, ...], bytes], tuple[Tensor, Grid]] = {}

        def processed(image: Tensor) -> tuple[Tensor, Grid]:
            pixels = (image.clamp(0, 1) * 255).round().to("cpu", torch.uint8).numpy()
            key = (pixels.shape, pixels.tobytes())
            if key not in known:
                known[key] = vision_patches(self.bundle.image_processor, image)
            return known[key]

        found = [[processed(image) for image in images] for images in samples]
        patches = [torch.cat([nothing, *(patches for patches, _ in each)]) for each in found]
        return ImagePatchCondition.pack(
            patches=[each.to(self.bundle.device) for each in patches],
            grids=[tuple(grid for _, grid in each) for each in found],
        )

    def _seen_positions(self, prompt: Tensor, grids: tuple[Grid, ...], later: tuple[Range, ...]) -> Tensor:
        """Positions [3, n] of a prompt, and of what follows it up to the end of its last image."""
        if not grids:
            return torch.arange(len(prompt), device=prompt.device).expand(3, -1)
        behind = prompt.new_zeros(max((end for _, end in later), default=len(prompt)) - len(prompt))
        for start, end in later:
            behind[start - len(prompt) : end - len(prompt)] = self.bundle.image_token_id
        return self._rope_index(torch.cat([prompt, behind]), grids)

    def _rope_index(self, prompt: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        """Positions [3, P] of a prompt with images, by the library."""
        places, _ = self.bundle.model.model.get_rope_index(
            prompt[None],
            mm_token_type_ids=(prompt == self.bundle.image_token_id).int()[None],
            image_grid_thw=torch.tensor(grids, dtype=torch.long, device=prompt.device),
        )
        return places[:, 0]
