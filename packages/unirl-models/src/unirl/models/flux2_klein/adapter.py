"""FLUX.2 Klein: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

from unirl.models.flux2.adapter import Flux2Adapter
from unirl.models.flux2_klein.bundle import Flux2KleinBundle
from unirl.models.flux2_klein.rules import BASE_CHECKPOINTS
from unirl.models.guidance import refuse_guidance
from unirl.types.sampling import DiffusionSamplingParams


class Flux2KleinAdapter(Flux2Adapter[Flux2KleinBundle]):
    """Conditions: as `Flux2Adapter`, and "negative_text" where guidance is on.

    The stock pipeline's negative prompt is always "".
    """

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError for what this family would ignore, guidance of a distilled checkpoint included."""
        super().check_params(params)
        if self.bundle.is_distilled:
            refuse_guidance(params, self.bundle.pretrained_model, BASE_CHECKPOINTS)
