"""SDXL as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.sdxl.adapter import SDXLAdapter


class SDXLPipeline(DiffusersPipeline):
    """Stable Diffusion XL, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`.

    The kernel of its published policy gradients (DDPO) is `unirl.sde.kernels.DDIMStrategy`; any other serves as well.
    """

    takes_any_sigma = False
    adapter_class = SDXLAdapter
