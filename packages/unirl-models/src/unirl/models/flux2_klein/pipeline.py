"""FLUX.2 Klein as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.flux2_klein.adapter import Flux2KleinAdapter


class Flux2KleinPipeline(DiffusersPipeline):
    """FLUX.2 Klein, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = Flux2KleinAdapter
