"""Returns images or videos from the data instead of samples, so that training on preference data, and supervised
fine-tuning, look like any other rollout.

If the rows of a request have images (`unirl.types.preference`), the response has these, encoded to clean latents. Other
requests, such as evaluations, are sampled from the policy.
"""

from __future__ import annotations

from typing import ClassVar

from unirl.rollout.checks import diffusion_params, pinned_sigmas, verify_segment
from unirl.rollout.engine.offline.pictures import read_pictures, read_videos
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images, Videos
from unirl.types.preference import given_image
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


class OfflineRolloutEngine(TrainsideRolloutEngine):
    """Returns the images or videos in the rows of a request; samples if they have none.

    Arguments: see `TrainsideRolloutEngine`; forward_batch_size also bounds how many images are encoded together. The
    response stores only the clean latents, and no policy version, since the policy did not make these images.
    """

    needs_images: ClassVar[bool] = True
    gives_logp: ClassVar[bool] = False

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
        conditions = self._pipeline.encode(req.primitives, params)
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=self._kept(media))
        return RolloutResp(tracks={self._track: track})

    def _read(self, references: list[str], params: DiffusionSamplingParams) -> Images | Videos:
        size = params.height, params.width
        if params.num_frames == 1:
            return Images(pixels=read_pictures(references, *size).to(self._device))
        return Videos.pack(frames=[each.to(self._device) for each in read_videos(references, params.num_frames, *size)])
