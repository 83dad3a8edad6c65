"""CogVideoX as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.cogvideox.adapter import CogVideoXAdapter
from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline


class CogVideoXPipeline(DiffusersPipeline):
    """CogVideoX, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`.

    schedule: the 2B checkpoint's own spacing is "linspace"; its authors sample it with "trailing". Where the number of
    steps divides 1000, "trailing" gives the latents of the stock pipeline, see `unirl.sde.timesteps`.
    """

    takes_any_sigma = False
    adapter_class = CogVideoXAdapter
