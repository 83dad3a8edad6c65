"""FLUX.2 dev as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.flux2.adapter import Flux2DevAdapter


class Flux2DevPipeline(DiffusersPipeline):
    """FLUX.2 dev, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = Flux2DevAdapter
