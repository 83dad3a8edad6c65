"""SD3 as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.sd3.adapter import SD3Adapter


class SD3Pipeline(DiffusersPipeline):
    """Stable Diffusion 3 and 3.5, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`.

    The schedule without a name is "linear", or "dynamic" where the checkpoint's scheduler says so; that of the stock
    pipeline is "diffusers". Published runs used both, see `unirl.sde.schedule`: name the one to reproduce.
    """

    adapter_class = SD3Adapter
