"""LTX-2 as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.ltx2.adapter import LTX2Adapter


class LTX2Pipeline(DiffusersPipeline):
    """LTX-2, video with sound, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = LTX2Adapter
