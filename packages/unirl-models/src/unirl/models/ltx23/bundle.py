"""The modules of an LTX-2.3 pipeline folder, where they are not LTX-2's."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.components import frozen
from unirl.models.extras import from_extra
from unirl.models.ltx2.bundle import LTX2Bundle

with from_extra("diffusers"):
    import diffusers

try:
    from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE
except ImportError as error:
    raise ImportError(
        f"LTX-2.3 needs diffusers 0.38 or later, which has its gates, modulations and vocoder; installed is "
        f"{diffusers.__version__}. Update it: pip install 'diffusers>=0.38'"
    ) from error


class LTX23Bundle(LTX2Bundle):
    """LTX-2.3, see `LTX2Bundle`: the same classes in other configurations, and a vocoder that extends the band.

    The transformer gates its attention and modulates what it reads of the text by the noise level; the connectors
    project the text for video and sound apart, to the widths of their streams.
    """

    family = "LTX-2.3"
    version = "2.3"
    components = {**LTX2Bundle.components, "vocoder": frozen(LTX2VocoderWithBWE)}
