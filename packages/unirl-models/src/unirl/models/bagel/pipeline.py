"""BAGEL as the pipelines that recipes name: images, and the texts before them or about them. Both share a bundle."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.bagel.adapter import BagelAdapter
from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.text_adapter import BagelTextAdapter
from unirl.models.pipeline import DiffusionPipeline
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.sde.kernels import SDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.types.bounds import PositiveInt, bounded

PUBLISHED_SHIFT = 3.0


@bounded("pipeline")
class BagelPipeline(DiffusionPipeline):
    """Images of a prompt, of a prompt and a thought, or of given images, see `unirl.models.pipeline.DiffusionPipeline`.

    schedule: None is linspace(1, 0, T + 1) shifted by 3, as published, where T + 1 is called the number of timesteps.
    system_prompt, decode_batch_size, reference_sides: see `BagelAdapter`. forward_batch_size: see `DiffusionPipeline`.
    """

    def __init__(
        self,
        bundle: BagelBundle,
        strategy: SDEStrategy,
        schedule: SigmaSchedule | None = None,
        *,
        system_prompt: str | None = None,
        decode_batch_size: PositiveInt = 8,
        forward_batch_size: PositiveInt | None = None,
        reference_sides: Sequence[int] = (512, 1024),
    ) -> None:
        adapter = BagelAdapter(
            bundle,
            system_prompt=system_prompt,
            decode_batch_size=decode_batch_size,
            reference_sides=reference_sides,
        )
        levels = SigmaSchedule("linear", shift=PUBLISHED_SHIFT) if schedule is None else schedule
        super().__init__(adapter, strategy, levels, forward_batch_size=forward_batch_size)


class BagelTextPipeline(AutoregressivePipeline):
    """Thoughts and answers, see `unirl.models.text_pipeline.AutoregressivePipeline`.

    system_prompt: see `BagelTextAdapter`.
    """

    def __init__(self, bundle: BagelBundle, *, system_prompt: str | None = None) -> None:
        super().__init__(BagelTextAdapter(bundle, system_prompt=system_prompt))
