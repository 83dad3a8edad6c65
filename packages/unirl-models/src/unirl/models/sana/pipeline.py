"""Sana as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.sana.adapter import SanaAdapter


class SanaPipeline(DiffusersPipeline):
    """Sana, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = SanaAdapter
