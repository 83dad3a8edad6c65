"""LTX-2 as the pipeline that recipes name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from unirl.models.diffusers_pipeline.video_sound import VideoWithSoundPipeline
from unirl.models.diffusion import never
from unirl.models.ltx2.adapter import LTX2Adapter
from unirl.models.ltx2.audio_gradient import scale_audio_gradient
from unirl.models.ltx2.bundle import LTX2Bundle
from unirl.models.ltx2.regions import RegionMaps
from unirl.models.ltx2.rules import Span, span_problem, steps_of, window_problem
from unirl.sde.kernels import SDEStrategy
from unirl.sde.schedule import Convention, SigmaSchedule
from unirl.types.bounds import bounded
from unirl.types.devices import has_values
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


@bounded("pipeline")
class LTX2Pipeline(VideoWithSoundPipeline):
    """LTX-2, video with sound, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`.

    audio_gradient: spans of blocks as [first, last, scale]: of the gradient that the video's stream sends back there to
        the audio tokens it attends to, `scale` in [0, 1] is kept. Blocks in no span keep all of it.
    region_steps: first and last share of the steps at which samples note how much of the sound's attention each place
        of the video gets (`LatentSegment.regions`, the mean over steps and blocks); [0.5, 0.9] as the authors of
        OmniNFT. None: nothing is noted. Samples are the same either way, but never share steps.
    region_blocks: first and last block where it is noted; None: all.
    Raises ConfigError for spans, steps and blocks that the model does not have.
    """

    adapter_class = LTX2Adapter
    recipe_rules: ClassVar[str] = "unirl.models.ltx2.rules"

    def __init__(
        self,
        bundle: LTX2Bundle,
        strategy: SDEStrategy,
        schedule: SigmaSchedule | Convention | None = None,
        *,
        audio_gradient: Sequence[Span] | None = None,
        region_steps: Sequence[float] | None = None,
        region_blocks: Sequence[int] | None = None,
        **options: Any,  # Any: the keywords of DiffusersPipeline
    ) -> None:
        super().__init__(bundle, strategy, schedule, **options)
        blocks = bundle.transformer.transformer_blocks
        problem = span_problem(audio_gradient or (), len(blocks))
        if problem is not None:
            raise ConfigError(f"pipeline.audio_gradient {problem}.")
        scale_audio_gradient(blocks, audio_gradient or ())
        wrong = window_problem(region_steps, region_blocks, len(blocks))
        if wrong is not None:
            raise ConfigError(f"pipeline.{wrong[0]} {wrong[1]}.")
        self._region_steps = region_steps
        self._regions: RegionMaps | None = None
        if region_steps is not None:
            first, last = region_blocks or (0, len(blocks) - 1)
            self._regions = RegionMaps(blocks[first : last + 1])
            cast(LTX2Adapter, self.adapter).regions = self._regions  # what adapter_class makes

    def diffuse(
        self,
        conditions: Conditions,
        initial_latents: Tensor,
        sigmas: Tensor,
        params: DiffusionSamplingParams,
        *,
        noise_keys: Sequence[str],
        start_keys: Sequence[str] | None = None,
        own_steps: Sequence[int] | None = None,
        begun: LatentSegment | None = None,
        is_ending: Callable[[], bool] = never,
    ) -> LatentSegment:
        """See `unirl.models.pipeline.DiffusionPipeline`; with `region_steps` the segment has `regions`.

        Raises ConfigError for branching with `region_steps`.
        """
        options: dict[str, Any] = {"noise_keys": noise_keys, "own_steps": own_steps, "is_ending": is_ending}
        if self._regions is None or self._region_steps is None:
            return super().diffuse(
                conditions, initial_latents, sigmas, params, start_keys=start_keys, begun=begun, **options
            )
        if params.branching is not None:
            raise ConfigError("region_steps needs samples that share no steps. Set sampling.branch_steps: null.")
        steps = steps_of(self._region_steps, params.num_inference_steps)
        if not has_values(initial_latents.device):  # a rehearsal, which runs one of the blocks that are alike
            steps = range(0)
        start = 0 if begun is None else _reached(begun)
        with self._regions.noting(steps, start) as notes:
            segment = super().diffuse(conditions, initial_latents, sigmas, params, begun=begun, **options)
        taken = [step for step in steps if start <= step < _reached(segment)]
        sizes = [sum(len(part) for part in notes.get(step, ())) for step in taken]
        if set(notes) != set(taken) or set(sizes) - {segment.batch_size}:
            raise ContractError(f"of {segment.batch_size} samples, steps {taken} noted the attention of {sizes}")
        shape = cast(LTX2Adapter, self.adapter).video_shape(params)[1:]
        maps = segment.latents.new_zeros((segment.batch_size, *shape), dtype=torch.float32)
        if begun is not None:
            maps = maps + begun.regions["video"]
        for step in taken:
            maps = maps + torch.cat(notes[step]).unflatten(1, shape) / len(steps)
        return segment.replace(regions={"video": maps})


def _reached(segment: LatentSegment) -> int:
    """The position of samples that are all at one."""
    return segment.num_steps if segment.unfinished is None else int(segment.unfinished.reached[0])
