"""Wan as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.wan.adapter import WanAdapter
from unirl.models.wan.animate_adapter import WanAnimateAdapter
from unirl.models.wan.image_adapter import WanImageAdapter
from unirl.models.wan.vace_adapter import WanVACEAdapter


class WanPipeline(DiffusersPipeline):
    """Wan 2.1 and 2.2, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`.

    The schedule without a name is that of the checkpoint's UniPC scheduler, see `unirl.sde.schedule`; published runs
    shift linspace(1, 0, T + 1) by 5.
    """

    adapter_class = WanAdapter


class WanImagePipeline(DiffusersPipeline):
    """Wan from images, see `WanPipeline`."""

    adapter_class = WanImageAdapter


class WanVACEPipeline(DiffusersPipeline):
    """Wan from a video, a mask and reference images, see `WanPipeline`."""

    adapter_class = WanVACEAdapter


class WanAnimatePipeline(DiffusersPipeline):
    """Wan that animates a character of an image, see `WanPipeline`."""

    adapter_class = WanAnimateAdapter
