"""Inputs of Qwen2-VL, Qwen2.5-VL and Qwen3-VL from images and text.

Built on the tokenizer and the PIL image processor, because transformers' own processor of these models wants
torchvision for videos; texts and pixels come out as from it.

Legend: b rows, T tokens, N patches, F frames, C H W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from unirl.reward.local.preprocess import normalised
from unirl.reward.local.pretrained import check_source, load_transformers
from unirl.types.errors import ConfigError

PICTURE_TYPE, VIDEO_TYPE = 1, 2
"""How transformers marks the tokens of images and videos in mm_token_type_ids; text is 0."""


class QwenVLReader:
    """Turns a turn of the user, images and then text, into tensors.

    source: folder or hub id of the model. min_pixels, max_pixels: of an image after resizing; the image processor's
    own where None. tokens: special tokens to add to the tokenizer.
    Raises ConfigError if the tokenizer or image processor cannot be loaded or is not of this family.
    """

    def __init__(
        self,
        source: str,
        owner: str,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        tokens: Sequence[str] = (),
    ) -> None:
        transformers = load_transformers(owner)
        check_source(source, f"{owner}: model")
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)  # Any: transformers is optional
            # The PIL processor, not the torchvision one: rewards must not depend on what else is installed.
            self.image_processor: Any = transformers.Qwen2VLImageProcessorPil.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{owner}: cannot load the processor of model {source!r}: {error}") from error
        if tokens:
            self.tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
        self._owner = owner
        self.picture_id = self._token_id("<|image_pad|>", source)
        self.video_id = self._token_id("<|video_pad|>", source)
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"{owner}: the tokenizer of model {source!r} has no chat template. Use a chat model.")
        if self.tokenizer.pad_token_id is None:
            raise ConfigError(f"{owner}: the tokenizer of model {source!r} has no padding token")
        size = dict(self.image_processor.size)
        size |= {"shortest_edge": min_pixels} if min_pixels is not None else {}
        size |= {"longest_edge": max_pixels} if max_pixels is not None else {}
        if not 0 < size["shortest_edge"] <= size["longest_edge"]:
            raise ConfigError(f"{owner}: min_pixels = {min_pixels} and max_pixels = {max_pixels} leave no size: {size}")
        self.image_processor.size = size

    def check_text(self, text: str) -> None:
        """Raises ValueError for a text that holds a special token, which could end the turn or stand for an image."""
        found = [token for token in self.tokenizer.all_special_tokens if token in text]
        if found:
            raise ValueError(f"{self._owner}: the text {text[:60]!r} holds the special tokens {found}; remove them")

    def chat(self, text: str, num_pictures: int = 0, num_videos: int = 0) -> str:
        """One turn of the user, media first, ready for the reply, in the model's own chat template."""
        media = [{"type": "image"}] * num_pictures + [{"type": "video"}] * num_videos
        turn = {"role": "user", "content": [*media, {"type": "text", "text": text}]}
        return self.tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)

    def pixels(self, pictures: Sequence[Image.Image]) -> tuple[Tensor, Tensor]:
        """Patches [N, values of a patch], rescaled and normalised, and the grid (t, h, w) of each image [., 3]."""
        found = self.image_processor(images=list(pictures), return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]

    def tokens(
        self,
        chats: Sequence[str],
        picture_grids: Tensor | None = None,
        video_grids: Tensor | None = None,
        *,
        padding_side: Literal["left", "right"],
    ) -> dict[str, Tensor]:
        """input_ids, attention_mask and mm_token_type_ids [b, T], one placeholder token a merged patch.

        grids: [., 3], of the media in the order of their placeholders over all rows.
        """
        merged = self.image_processor.merge_size**2
        lengths = {
            id: iter([] if grids is None else (grids.prod(dim=-1) // merged).tolist())
            for id, grids in ((self.picture_id, picture_grids), (self.video_id, video_grids))
        }
        rows: list[list[int]] = []
        for chat in chats:
            ids = self.tokenizer(chat, add_special_tokens=False)["input_ids"]
            rows.append([id for token in ids for id in [token] * (next(lengths[token]) if token in lengths else 1)])
        input_ids = _padded(rows, self.tokenizer.pad_token_id, padding_side)
        mask = _padded([[1] * len(row) for row in rows], 0, padding_side)
        kinds = PICTURE_TYPE * (input_ids == self.picture_id) + VIDEO_TYPE * (input_ids == self.video_id)
        return {"input_ids": input_ids, "attention_mask": mask, "mm_token_type_ids": kinds.to(torch.int32)}

    def _token_id(self, token: str, source: str) -> int:
        if token not in self.tokenizer.get_vocab():
            raise ConfigError(f"{self._owner}: the tokenizer of model {source!r} has no {token}; use a Qwen-VL model")
        return self.tokenizer.convert_tokens_to_ids(token)

    def patches(self, frames_FCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Patches [N, values of a patch] and grid [1, 3] of a video, or of an image as its only frame.

        frames: [F, 3, H, W] in [0, 1], H and W multiples of a merged patch; with gradients. They are normalised, and
        the last is repeated to a multiple of the temporal patch.
        """
        settings = self.image_processor
        patch, merge, together = settings.patch_size, settings.merge_size, settings.temporal_patch_size
        frames = normalised(frames_FCHW, settings.image_mean, settings.image_std)
        frames = torch.cat([frames, frames[-1:].expand(-len(frames) % together, -1, -1, -1)])
        count, channels, height, width = frames.shape
        grid = (count // together, height // patch, width // patch)
        split = frames.reshape(
            grid[0], together, channels, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch
        )
        # Patches in the order of their merged blocks; in each the values of channel, frame, row and column.
        found = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(5).flatten(0, 4)
        return found, torch.tensor([grid])

    def resized_hw(self, height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        """The size nearest to an image's shape whose sides are multiples of a merged patch and whose area fits."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        factor = self.image_processor.patch_size * self.image_processor.merge_size
        return smart_resize(height, width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)


def _padded(rows: Sequence[list[int]], value: int, side: Literal["left", "right"]) -> Tensor:
    longest = max(len(row) for row in rows)
    filled = [(row, [value] * (longest - len(row))) for row in rows]
    return torch.tensor([pad + row if side == "left" else row + pad for row, pad in filled])
