"""The verifiers of the sounds world as scorers, one for each medium."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.reward.card import ScorerCard
from unirl.reward.local.video.frames import frames_of, videos_of
from unirl.reward.worlds.verifier import VerifierScorer
from unirl.types.reward import RewardRequest


class SoundsVideoScorer(VerifierScorer):
    """Verifies that videos show the moving object of their prompts, whatever they sound like. See `VerifierScorer`."""

    prompt_grammar = "unirl.reward.worlds.sounds_grammar.parse_prompt"
    card = ScorerCard(
        name="sounds_video",
        summary="does the video show what a prompt of the sounds world asks for: object, colour, steady motion",
        media=("video",),
        needs="prompt",
        low=0,
        high=2,
        typical="strict (0 or 1) + soft in [0, 1]",
        extra="shapes",
        source="the sounds world of this project",
    )

    # Any: the keywords of VerifierScorer.
    def __init__(self, *, name: str = "sounds_video", **options: Any) -> None:
        super().__init__(name=name, **options)

    def score_batch(self, request: RewardRequest) -> dict[str, Tensor]:
        """strict and soft, float32 [b]. Raises ValueError for a prompt outside the grammar."""
        with self.from_extra():
            from unirl.reward.worlds.sounds import score_videos
        strict_b, soft_b = score_videos(frames_of(request), request.prompts)
        return {"strict": strict_b, "soft": soft_b}


class SoundsToneScorer(VerifierScorer):
    """Verifies that the sound of videos has the tone of their prompts, whatever they show. See `VerifierScorer`."""

    prompt_grammar = "unirl.reward.worlds.sounds_grammar.parse_prompt"
    card = ScorerCard(
        name="sounds_tone",
        summary="does the sound of the video have the tone that a prompt of the sounds world asks for, throughout",
        media=("video",),
        needs="prompt; videos with sound",
        low=0,
        high=2,
        typical="strict (0 or 1) + soft in [0, 1]",
        extra="shapes",
        source="the sounds world of this project",
    )

    # Any: the keywords of VerifierScorer.
    def __init__(self, *, name: str = "sounds_tone", **options: Any) -> None:
        super().__init__(name=name, **options)

    def score_batch(self, request: RewardRequest) -> dict[str, Tensor]:
        """strict and soft, float32 [b]. Raises ValueError for a prompt outside the grammar, or videos without sound."""
        with self.from_extra():
            from unirl.reward.worlds.sounds import score_sounds
        sounds = videos_of(request).audio
        if sounds is None or sounds.sample_rate is None:
            raise ValueError("its video has no sound, or none of a known rate; take a model that makes one (LTX-2)")
        strict_b, soft_b = score_sounds(sounds.unpack("waveform"), sounds.sample_rate, request.prompts)
        return {"strict": strict_b, "soft": soft_b}
