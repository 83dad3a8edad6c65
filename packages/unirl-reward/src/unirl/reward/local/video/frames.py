"""Videos by their frames: any image scorer on some of them, and how little they change from one to the next.

Legend: T frames of a video.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from unirl.reward.base import LocalScorer, Scored
from unirl.reward.card import Normalisation, ScorerCard
from unirl.reward.local.images.pickscore import PickScoreRewardScorer
from unirl.reward.local.judges.judge import spread
from unirl.reward.local.pixels import check_pixels
from unirl.types.bounds import NonNegative, PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images, Videos
from unirl.types.reward import RewardRequest

FRAMES, CONSISTENCY = 0.7, 0.3
"""Default shares of the two components."""


@bounded("scorer")
class FrameScorer(LocalScorer):
    """frames_weight * mean score of `num_frames` frames + consistency_weight * temporal consistency.

    scorer: of single images; asked with each frame and the video's own prompt and metadata. The frames lie evenly
    from the first to the last; all of a shorter video. consistency: see `temporal_consistency`.
    The consistency lies in [0, 1], so the scorer should too: PickScore and CLIP do with their normalisation.
    A frame that cannot be scored fails its video. Differentiable where the scorer of images is.
    """

    is_differentiable: ClassVar[bool] = True
    reads_prompt: ClassVar[bool] = False  # but its scorer of images may
    card = ScorerCard(
        name="video",
        summary="an image scorer on frames of a video, and how little neighbouring frames differ",
        media=("video",),
        needs="what its image scorer needs",
        typical="0.7 of the image scorer's value + 0.3 of a consistency in [0, 1]",
        source="this project",
    )

    def __init__(
        self,
        *,
        scorer: LocalScorer,
        num_frames: PositiveInt = 8,
        frames_weight: NonNegative = FRAMES,
        consistency_weight: NonNegative = CONSISTENCY,
        name: str = "video",
        batch_size: PositiveInt = 4,
    ) -> None:
        weights = {"frames": frames_weight, "consistency": consistency_weight}
        super().__init__(name=name, batch_size=batch_size, device=scorer.device, component_weights=weights)
        if scorer.is_groupwise:
            raise ConfigError(
                f"scorer {name}: {scorer.name} compares samples of a group, and frames of a video are none. Take a "
                "scorer of single images."
            )
        self._scorer = scorer
        self.num_frames = num_frames

    def modules(self) -> list[nn.Module]:
        """Those of the image scorer."""
        return self._scorer.modules()

    def move_to(self, device: str) -> None:
        """Move the image scorer."""
        self._scorer.move_to(device)
        self.device = self._scorer.device

    def offload(self) -> None:
        """Offload the image scorer too."""
        self._scorer.offload()
        self.is_offloaded = True

    def onload(self) -> None:
        """Bring the image scorer back too."""
        self._scorer.onload()
        self.is_offloaded = False

    def score_batch(self, request: RewardRequest) -> Scored:
        """Mean score of the frames and consistency, float32 [b]."""
        videos = frames_of(request)
        asked, rows = self._asked(request, videos)
        named = asked.sample_ids
        answer = self._scorer.score_isolated(asked, "batch")
        means, reasons = [], []
        for row in range(len(videos)):
            mine = [i for i, owner in enumerate(rows) if owner == row]
            failed = [f"{named[i]}: {answer.errors[i]}" for i in mine if answer.errors[i] is not None]
            means.append(math.nan if failed else answer.rewards[mine].mean().item())
            reasons.append(failed[0] if failed else None)
        consistency = torch.stack([temporal_consistency(video).cpu() for video in videos])
        return Scored({"frames": torch.tensor(means), "consistency": consistency}, reasons)

    def score_batch_with_gradient(self, request: RewardRequest) -> dict[str, Tensor]:
        """The same [b] with gradients to the frames."""
        videos = frames_of(request)
        asked, rows = self._asked(request, videos)
        scores = self._scorer.score_with_gradient(asked)
        frames = torch.stack([each.mean() for each in scores.split([rows.count(row) for row in range(len(videos))])])
        return {"frames": frames, "consistency": torch.stack([temporal_consistency(video) for video in videos])}

    def _asked(self, request: RewardRequest, videos: list[Tensor]) -> tuple[RewardRequest, list[int]]:
        """What the scorer of images is asked, frame by frame, and which video each frame is of."""
        places = [spread(len(video), self.num_frames) for video in videos]
        rows = [row for row, chosen in enumerate(places) for _ in chosen]
        pictures = Images(pixels=torch.cat([video[chosen] for video, chosen in zip(videos, places, strict=True)]))
        named = [f"{request.sample_ids[row]} frame {place}" for row, place in zip(rows, sum(places, []), strict=True)]
        return request.select(rows).replace(sample_ids=named, generated={"image": pictures}), rows


@bounded("scorer")
class VideoPickScoreScorer(PickScoreRewardScorer):
    """PickScore of a video's first frame, or the mean over `num_frames` frames from the first to the last.

    Other arguments as in PickScoreRewardScorer.
    """

    card = ScorerCard(
        name="video_pickscore",
        summary="PickScore of the first frame, or the mean over several",
        media=("video",),
        needs="prompt",
        low=-100,
        high=100,
        typical="logit, 18 to 24",
        normalisation=Normalisation(26, is_default=True),
        extra="clip",
        source="Pick-a-Pic, arXiv 2305.01569",
    )

    def __init__(
        self,
        *,
        num_frames: PositiveInt = 1,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        normalise: bool = True,
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "video_pickscore",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(
            model=model,
            processor=processor,
            normalise=normalise,
            dtype=dtype,
            device=device,
            name=name,
            batch_size=batch_size,
        )
        self.num_frames = num_frames

    def score_batch(self, request: RewardRequest) -> Tensor:
        """Mean PickScore of the frames, float32 [b]."""
        return self._mean_scores(request, self.model_input)

    def score_batch_with_gradient(self, request: RewardRequest) -> Tensor:
        """The same [b] with gradients to the frames."""
        check_pixels(torch.cat(frames_of(request)))
        return self._mean_scores(request, self.model_input_with_gradient)

    def _mean_scores(self, request: RewardRequest, model_input: Callable[[Tensor], Tensor]) -> Tensor:
        chosen = [video[spread(len(video), self.num_frames)] for video in frames_of(request)]
        prompts = [prompt for prompt, frames in zip(request.prompts, chosen, strict=True) for _ in frames]
        scores = self._scores(prompts, model_input(torch.cat(chosen)))
        return torch.stack([each.mean() for each in scores.split([len(frames) for frames in chosen])])


def frames_of(request: RewardRequest) -> list[Tensor]:
    """Frames [T, 3, H, W] of each generated video. Raises as `videos_of`."""
    return videos_of(request).unpack("frames")


def videos_of(request: RewardRequest) -> Videos:
    """The generated videos. Raises ContractError for a request without."""
    videos = request.generated.get("video")
    if not isinstance(videos, Videos):
        raise ContractError(f"this request has no generated video; it has {sorted(request.generated)}")
    return videos


def temporal_consistency(frames_TCHW: Tensor) -> Tensor:
    """max(0, 1 - mean |frame - next frame|), a scalar in [0, 1], over all neighbours; 1 for a single frame.

    frames: [T, C, H, W] in [0, 1].
    """
    if len(frames_TCHW) == 1:
        return frames_TCHW.new_ones(())
    return (1 - frames_TCHW.diff(dim=0).abs().mean()).clamp(min=0)
