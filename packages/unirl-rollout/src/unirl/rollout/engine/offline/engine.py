"""Returns images or videos from the data instead of samples, so that training on preference data, and supervised
fine-tuning, look like any other rollout.

If the rows of a request have images (`unirl.types.preference`), the response has these, encoded to clean latents. Other
requests, such as evaluations, are sampled from the policy.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from unirl.rollout.checks import diffusion_params, pinned_sigmas, verify_segment
from unirl.rollout.engine.base import MediaBits
from unirl.rollout.engine.guidance_rules import dropout_problem
from unirl.rollout.engine.offline.pictures import read_pictures, read_videos
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.sde.noise import keyed_uniform
from unirl.types.bounds import Bounds, PositiveInt, bounded
from unirl.types.conditions import NEGATIVE, Condition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images, Videos
from unirl.types.noise import noise_key
from unirl.types.preference import given_image
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

GUIDED = 2.0
"""A guidance scale that has the negative prompt encoded; any above 1 does."""


@bounded("engine")
class OfflineRolloutEngine(TrainsideRolloutEngine):
    """Returns the images or videos in the rows of a request; samples if they have none.

    Arguments: see `TrainsideRolloutEngine`; forward_batch_size also bounds how many images are encoded together. The
    response stores only the clean latents, and no policy version, since the policy did not make these images.

    prompt_dropout: probability that a given image is trained with sampling.negative_prompt instead of its prompt, so
        that the unconditional side of guidance is trained, too; in training scripts of diffusers
        `proportion_empty_prompts`. Drawn per group of a rollout, by the seed of the sampling. Source: Ho and Salimans
        (arXiv 2207.12598), algorithm 1.
    """

    needs_images: ClassVar[bool] = True
    gives_logp: ClassVar[bool] = False
    keeps_regions: ClassVar[bool] = False

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore | None = None,
        *,
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        media_bits: MediaBits = 32,
        decode: bool = True,
        drop_text_encoders: bool = False,
        dump_dir: str | None = None,
        track: str = "image",
        prompt_dropout: Annotated[float, Bounds(ge=0, lt=1)] = 0.0,
    ) -> None:
        super().__init__(
            pipeline,
            policies,
            forward_batch_size=forward_batch_size,
            device=device,
            rank=rank,
            media_bits=media_bits,
            decode=decode,
            drop_text_encoders=drop_text_encoders,
            dump_dir=dump_dir,
            track=track,
        )
        self._prompt_dropout = prompt_dropout

    def _generate_chunk(self, req: RolloutReq) -> RolloutResp:
        params = diffusion_params(req)
        references = [given_image(row, name) for row, name in zip(req.metadata, req.sample_ids, strict=True)]
        given = [reference for reference in references if reference is not None]
        if not given:
            return super()._generate_chunk(req)
        if len(given) < len(references):
            first = req.sample_ids[references.index(None)]
            raise ContractError(f"{len(given)} of {len(references)} rows bring images; sample {first} has none")
        if req.rollout_id < 0:
            raise ConfigError(
                "the rows of eval.prompts bring images, so an evaluation would judge these instead of the policy. "
                "Give eval.prompts a file of prompts alone."
            )
        if params.eta > 0:
            raise ConfigError(f"given images have no stochastic steps: sampling.eta = {params.eta} must be 0")
        sigmas = pinned_sigmas(req, params)
        media = self._read(given, params)
        latents = self._pipeline.encode_media(media)
        if list(latents.shape[1:]) != req.init_noise_latent_shape:
            raise ContractError(
                f"encoded media are {tuple(latents.shape)}, the request's latents {req.init_noise_latent_shape}"
            )
        segment = LatentSegment(
            latents=latents[:, None], sigmas=sigmas, indices=[params.num_inference_steps], params=params
        )
        verify_segment(segment, sigmas, params)
        conditions = self._conditions(req, params)
        decoded = self._kept(media) if self._decodes else None
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=decoded)
        return RolloutResp(tracks={self._track: track})

    def _encoded_for(self, params: DiffusionSamplingParams) -> DiffusionSamplingParams:
        return self._guided(params) if self._prompt_dropout else params

    def _guided(self, params: DiffusionSamplingParams) -> DiffusionSamplingParams:
        """With guidance, so that the pipeline encodes the negative prompt. Raises ConfigError if there is none."""
        problem = dropout_problem(self._prompt_dropout, params.negative_prompt, params.distilled_guidance_scale)
        if problem is not None:
            raise ConfigError(f"engine.{problem}")
        return dataclasses.replace(params, guidance_scale=max(params.guidance_scale, GUIDED))

    def _conditions(self, req: RolloutReq, params: DiffusionSamplingParams) -> dict[str, Condition]:
        """Conditions of the prompts, those of the negative prompt for samples whose prompt is dropped."""
        conditions = dict(self._pipeline.encode(req.primitives, params))
        dropped = self._dropped(req, params)
        if not dropped:
            return conditions
        without = self._pipeline.encode(req.select(dropped).primitives, self._guided(params))
        order = list(range(req.batch_size))
        for place, row in enumerate(dropped, start=req.batch_size):
            order[row] = place
        for slot in [name for name in conditions if NEGATIVE + name in without]:
            own = conditions[slot]
            conditions[slot] = type(own).concat([own, without[NEGATIVE + slot]]).select(order)
        return conditions

    def _dropped(self, req: RolloutReq, params: DiffusionSamplingParams) -> list[int]:
        if not self._prompt_dropout:
            return []
        names = [f"{noise_key(req.rollout_id, group)}::prompt_dropout" for group in req.group_ids]
        drawn = keyed_uniform(names, params.seed, (1,)).flatten().tolist()
        return [row for row, value in enumerate(drawn) if value < self._prompt_dropout]

    def _read(self, references: list[str], params: DiffusionSamplingParams) -> Images | Videos:
        size = params.height, params.width
        if params.num_frames == 1:
            return Images(pixels=read_pictures(references, *size).to(self._device))
        return Videos.pack(frames=[each.to(self._device) for each in read_videos(references, params.num_frames, *size)])
