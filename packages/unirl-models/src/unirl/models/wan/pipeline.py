"""Wan as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.wan.adapter import WanAdapter


class WanPipeline(DiffusersPipeline):
    """Wan 2.1 and 2.2, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`.

    The schedule without a name is that of the checkpoint's UniPC scheduler, see `unirl.sde.schedule`; published runs
    shift linspace(1, 0, T + 1) by 5.
    """

    adapter_class = WanAdapter
