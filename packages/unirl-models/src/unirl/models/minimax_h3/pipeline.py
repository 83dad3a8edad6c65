"""MiniMax-H3 as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.video_sound import VideoWithSoundPipeline
from unirl.models.minimax_h3.adapter import MiniMaxH3Adapter


class MiniMaxH3Pipeline(VideoWithSoundPipeline):
    """MiniMax-H3, video with sound, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = MiniMaxH3Adapter
