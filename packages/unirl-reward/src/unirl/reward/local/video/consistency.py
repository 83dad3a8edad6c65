"""How alike the frames of a video look to a vision model, and how well they fit a style: dimensions of VBench.

Source: VBench, arXiv 2311.17982, github.com/Vchitect/VBench (subject_consistency, background_consistency,
appearance_style).

Legend: b videos, T frames of one, D features.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.reward.card import ScorerCard
from unirl.reward.local.images.clip import CLIPRewardScorer
from unirl.reward.local.preprocess import CLIP_MEAN, CLIP_STD, at_least_float32, normalised
from unirl.reward.local.pretrained import check_dtype, load_complete, load_transformers
from unirl.reward.local.video.frames import frames_of
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.precision import DTYPES
from unirl.types.reward import RewardRequest

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STYLE_KEY = "appearance_style"
"""Field of a prompt's metadata with the words of its style."""
HUNDRED = 100.0
"""VBench divides CLIP's logit by it."""


def feature_consistency(features_TD: Tensor) -> Tensor:
    """Mean over frames t > 0 of (max(0, cos(f_t, f_t-1)) + max(0, cos(f_t, f_0))) / 2, a scalar; 1 for one frame."""
    if len(features_TD) == 1:
        return features_TD.new_ones(())
    unit_TD = nn.functional.normalize(features_TD, dim=-1)
    before = (unit_TD[1:] * unit_TD[:-1]).sum(dim=-1).clamp(min=0)
    first = (unit_TD[1:] * unit_TD[:1]).sum(dim=-1).clamp(min=0)
    return ((before + first) / 2).mean()


class FrameFeatureScorer(LocalScorer):
    """`feature_consistency` of a vision model's features of all frames, in [0, 1].

    model: that sees the frames. dtype: of it. frames_per_forward: most frames of one call of it.
    Frames are rounded to bytes, brought to `side` along their shorter edge without antialiasing, and rounded to bytes
    again, as torchvision does to bytes and VBench measures.
    """

    side: int
    mode: ClassVar[Literal["bilinear", "bicubic"]]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __init__(
        self,
        *,
        model: Any,  # Any: transformers is optional
        side: int,
        dtype: str,
        device: str,
        name: str,
        batch_size: PositiveInt,
        frames_per_forward: PositiveInt,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, device=device)
        self._model = model.to(device=device, dtype=DTYPES[dtype]).eval().requires_grad_(False)
        self.side = side
        self.frames_per_forward = frames_per_forward

    def modules(self) -> list[nn.Module]:
        """The vision model."""
        return [self._model]

    def score_batch(self, request: RewardRequest) -> Tensor:
        """Consistency of each video, float32 [b]."""
        return torch.stack([self._consistency(frames) for frames in frames_of(request)])

    @abstractmethod
    def features(self, input_TCHW: Tensor) -> Tensor:
        """[T, D] of the model's input."""

    def model_input(self, frames_TCHW: Tensor) -> Tensor:
        """Input of the model [T, 3, h, w] of frames in [0, 1]."""
        height, width = frames_TCHW.shape[-2:]
        short = min(height, width)
        size = (int(self.side * height / short), int(self.side * width / short))
        read = (frames_TCHW.float() * 255).round()
        resized = nn.functional.interpolate(read, size=size, mode=self.mode, align_corners=False)
        return normalised(resized.clamp(0, 255).round() / 255, self.mean, self.std)

    def _consistency(self, frames_TCHW: Tensor) -> Tensor:
        parts = self.model_input(frames_TCHW).to(self._model.dtype).split(self.frames_per_forward)
        return feature_consistency(torch.cat([at_least_float32(self.features(part)) for part in parts]))


@bounded("scorer")
class SubjectConsistencyScorer(FrameFeatureScorer):
    """VBench's subject consistency: do frames show the same subject, by features of DINO ViT-B/16.

    model: folder or hub id of a transformers ViTModel. Positions of other sizes than it was trained on are
    interpolated to the size itself, where DINO's own code adds 0.1 to it.
    Raises ConfigError if the model cannot be loaded, ImportError without transformers (extra `clip`).
    """

    mode = "bilinear"
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    model_billions = 0.086
    reads_prompt: ClassVar[bool] = False
    card = ScorerCard(
        name="subject_consistency",
        summary="whether the frames of a video show the same subject",
        media=("video",),
        low=0,
        high=1,
        typical="0.8 to 1; a still image has 1",
        extra="clip",
        source="VBench, arXiv 2311.17982; DINO, arXiv 2104.14294",
    )

    def __init__(
        self,
        *,
        model: str = "facebook/dino-vitb16",
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "subject_consistency",
        batch_size: PositiveInt = 4,
        frames_per_forward: PositiveInt = 32,
    ) -> None:
        check_dtype(dtype, name)
        of = load_transformers(f"scorer {name}").ViTModel
        what = f"scorer {name}: model"
        loaded = load_complete(of, model, what, dtype=torch.float32, add_pooling_layer=False)
        super().__init__(
            model=loaded,
            side=loaded.config.image_size,
            dtype=dtype,
            device=device,
            name=name,
            batch_size=batch_size,
            frames_per_forward=frames_per_forward,
        )

    def features(self, input_TCHW: Tensor) -> Tensor:
        """The class token after the last norm."""
        return self._model(pixel_values=input_TCHW, interpolate_pos_encoding=True).last_hidden_state[:, 0]


@bounded("scorer")
class BackgroundConsistencyScorer(FrameFeatureScorer):
    """VBench's background consistency: do frames show the same scene, by features of CLIP ViT-B/32.

    model: folder or hub id of a transformers CLIPModel. The middle square of a frame is what CLIP sees.
    Raises ConfigError if the model cannot be loaded, ImportError without transformers (extra `clip`).
    """

    mode = "bicubic"
    mean, std = CLIP_MEAN, CLIP_STD
    model_billions = 0.151
    reads_prompt: ClassVar[bool] = False
    card = ScorerCard(
        name="background_consistency",
        summary="whether the frames of a video show the same scene",
        media=("video",),
        low=0,
        high=1,
        typical="0.9 to 1; a still image has 1",
        extra="clip",
        source="VBench, arXiv 2311.17982; CLIP, arXiv 2103.00020",
    )

    def __init__(
        self,
        *,
        model: str = "openai/clip-vit-base-patch32",
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "background_consistency",
        batch_size: PositiveInt = 4,
        frames_per_forward: PositiveInt = 32,
    ) -> None:
        check_dtype(dtype, name)
        of = load_transformers(f"scorer {name}").CLIPModel
        loaded = load_complete(of, model, f"scorer {name}: model", dtype=torch.float32)
        super().__init__(
            model=loaded,
            side=loaded.config.vision_config.image_size,
            dtype=dtype,
            device=device,
            name=name,
            batch_size=batch_size,
            frames_per_forward=frames_per_forward,
        )

    def model_input(self, frames_TCHW: Tensor) -> Tensor:
        """The middle square of the resized frames."""
        resized = super().model_input(frames_TCHW)
        top, left = (round((length - self.side) / 2) for length in resized.shape[-2:])
        return resized[..., top : top + self.side, left : left + self.side]

    def features(self, input_TCHW: Tensor) -> Tensor:
        """The projected embedding."""
        return self._model.get_image_features(pixel_values=input_TCHW).pooler_output


@bounded("scorer")
class AppearanceStyleScorer(CLIPRewardScorer):
    """VBench's appearance style: CLIP's logit of a frame and the words of its style / 100, mean over all frames.

    The words are the prompt's `appearance_style` in its metadata, such as "Van Gogh style". Other arguments as in
    CLIPRewardScorer. A prompt without a style fails.
    """

    is_differentiable: ClassVar[bool] = False
    model_billions = 0.151
    card = ScorerCard(
        name="appearance_style",
        summary="how well the frames of a video fit the style that its prompt names",
        media=("video",),
        needs="metadata appearance_style",
        low=-1,
        high=1,
        typical="0.2 to 0.3",
        extra="clip",
        source="VBench, arXiv 2311.17982; CLIP, arXiv 2103.00020",
    )

    def __init__(
        self,
        *,
        model: str = "openai/clip-vit-base-patch32",
        processor: str | None = None,
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "appearance_style",
        batch_size: PositiveInt = 4,
    ) -> None:
        super().__init__(
            model=model,
            processor=processor,
            normalise=False,
            dtype=dtype,
            device=device,
            name=name,
            batch_size=batch_size,
        )

    def score_batch(self, request: RewardRequest) -> Tensor:
        """Mean logit of the frames / 100, float32 [b]. Raises ValueError for a prompt without a style."""
        found = []
        for frames, row in zip(frames_of(request), request.metadata, strict=True):
            style = (row or {}).get(STYLE_KEY)
            if not isinstance(style, str) or not style:
                raise ValueError(f"{STYLE_KEY} of its prompt is {style!r}, not the words of a style: 'oil painting'")
            found.append(self._scores([style] * len(frames), self.model_input(frames)).mean() / HUNDRED)
        return torch.stack(found)
