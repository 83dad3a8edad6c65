"""FLUX.1 as the pipelines that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.flux.adapter import FluxAdapter
from unirl.models.flux.fill import FluxFillAdapter
from unirl.models.flux.kontext import FluxKontextAdapter


class FluxPipeline(DiffusersPipeline):
    """FLUX.1 dev and schnell, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = FluxAdapter


class FluxKontextPipeline(DiffusersPipeline):
    """FLUX.1 Kontext."""

    adapter_class = FluxKontextAdapter


class FluxFillPipeline(DiffusersPipeline):
    """FLUX.1 Fill."""

    adapter_class = FluxFillAdapter
