"""Proves that an engine has the trainer's policy: both give the same log-probs for the same samples."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from unirl.types.errors import ConfigError, ContractError, UniRLError, WeightSyncError
from unirl.types.media import Images, Primitive, Texts
from unirl.types.noise import noise_keys
from unirl.types.protocols.engines import PushTarget
from unirl.types.protocols.models import AutoregressivePipeline, DiffusionPipeline
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import ARSamplingParams, BaseSamplingParams, DiffusionSamplingParams
from unirl.types.segments import LatentSegment, TextSegment


def canary_primitives(
    prompts: Sequence[str], image_size: int | None, *, has_masks: bool = False
) -> dict[str, Primitive]:
    """Inputs of the canary: texts in the slot "text" and, with an image size, one image per text in "image".

    image_size: side in pixels. Images are noise, the same in every run. has_masks: one mask per image in "mask", white
    on its right half. Raises ConfigError without texts, and for masks without images.
    """
    if not prompts or not all(prompts):
        raise ConfigError(f"sync.canary_prompts = {list(prompts)} must hold at least one text, and none empty")
    texts: dict[str, Primitive] = {"text": Texts(texts=list(prompts))}
    if image_size is None:
        if has_masks:
            raise ConfigError("sync.canary_mask = true masks images; set sync.canary_image_size too")
        return texts
    noise = torch.rand(len(prompts), 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    if not has_masks:
        return {**texts, "image": Images(pixels=noise)}
    mask = torch.zeros_like(noise)
    mask[..., image_size // 2 :] = 1
    return {**texts, "image": Images(pixels=noise), "mask": Images(pixels=mask)}


class Canary(ABC):
    """Has the engine sample from a few prompts, and computes log-probs of the samples with the trainer's weights.

    Catches what checksums cannot: weights that arrived and were bound, but to the wrong place, at the wrong scale or
    with stale caches. primitives: see `canary_primitives`; one sample per text. tolerance: in the unit of the
    log-probs.
    """

    unit: ClassVar[str]
    """Unit of a log-prob, for messages."""

    def __init__(self, primitives: Mapping[str, Primitive], tolerance: float) -> None:
        self._primitives = dict(primitives)
        texts = self._primitives["text"]
        if not isinstance(texts, Texts):
            raise ContractError(f"the canary's slot 'text' holds {type(texts).__name__}")
        self._prompts = texts.texts
        self._tolerance = tolerance

    @abstractmethod
    def _request(self, version: int) -> RolloutReq:
        """A request for one sample per prompt."""

    @abstractmethod
    def _gaps(self, track: RolloutTrack) -> Tensor:
        """|engine's log-prob - trainer's log-prob|, float32 [B, ...] or packed over samples; see `_sample_of`."""

    @abstractmethod
    def _sample_of(self, track: RolloutTrack, position: int) -> int:
        """The sample of a flat position in `_gaps`."""

    @abstractmethod
    def replay_only(self) -> None:
        """Run the forwards of `check` on a rank without an engine, since sharded ranks must run equally many."""

    def check(self, engine: PushTarget, version: int, policy: str | None = None) -> tuple[float, float]:
        """Largest and mean |engine's log-prob - trainer's log-prob|.

        Raises WeightSyncError if it exceeds the tolerance or the samples come from another version.
        """
        try:
            track = self._sampled(engine, version, policy)
        except UniRLError:
            self.replay_only()  # as the other ranks do, which know nothing of this
            raise
        gaps = self._gaps(track)
        largest, mean = float(gaps.max()), float(gaps.mean())
        if not largest <= self._tolerance:  # NaN is above every tolerance
            row = self._sample_of(track, int(gaps.argmax()))
            prompt = self._prompts[row % len(self._prompts)]  # the answers of several engines are concatenated
            raise WeightSyncError(
                f"the engine does not have the trainer's policy of version {version}: log-probs of the same samples "
                f"differ by up to {largest:.3g} {self.unit} ({mean:.3g} on average, {gaps.numel()} log-probs), most "
                f"for {prompt!r}; sync.canary_tolerance is {self._tolerance:g}. Compare the engine's "
                "model, dtype and adapter scale with the trainer's."
            )
        return largest, mean

    def _sampled(self, engine: PushTarget, version: int, policy: str | None) -> RolloutTrack:
        resp = engine.generate(self._request(version), policy)
        (track,) = resp.tracks.values()
        if track.policy_versions is None:
            raise ContractError("the engine answered the canary without policy versions")
        versions = sorted(set(track.policy_versions.tolist()))
        if versions != [version]:
            raise WeightSyncError(f"policy version {version} was pushed, but the engine samples with {versions}")
        return track

    def _plain_request(self, version: int, params: BaseSamplingParams) -> RolloutReq:
        """A request for one sample per prompt with nothing pinned."""
        names = self._names()
        return RolloutReq(
            sample_ids=names,
            group_ids=names,
            primitives=self._primitives,
            sampling_params=params,
            rollout_id=version,
        )

    def _names(self) -> list[str]:
        return [f"canary{row}" for row in range(len(self._prompts))]


class TokenCanary(Canary):
    """The engine continues prompts; the trainer scores its tokens. device: of the trainer's weights."""

    unit = "nats"
    default_tolerance: ClassVar[float] = 0.3
    """Rounding gives 1e-5 nats if both compute in fp32, about 0.1 in bf16."""
    _params: ClassVar[ARSamplingParams] = ARSamplingParams(temperature=1.0, max_new_tokens=8, seed=0)

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        device: torch.device,
        primitives: Mapping[str, Primitive],
        tolerance: float | None,
    ) -> None:
        super().__init__(primitives, self.default_tolerance if tolerance is None else tolerance)
        self._pipeline = pipeline
        self._device = device

    def _request(self, version: int) -> RolloutReq:
        return self._plain_request(version, self._params)

    def _gaps(self, track: RolloutTrack) -> Tensor:
        segment, own = _tokens(track), track.to(self._device)
        if segment.log_probs is None:
            raise ContractError("the engine answered the canary without log-probs")
        with self._pipeline.evaluating():
            logp_N = self._pipeline.replay(own.conditions, _tokens(own), self._params).logp_N.detach().float().cpu()
        return (logp_N - segment.log_probs.cpu()).abs()

    def _sample_of(self, track: RolloutTrack, position: int) -> int:
        return int(torch.bucketize(position, _tokens(track).cu_seqlens[1:], right=True))

    def replay_only(self) -> None:
        conditions = self._pipeline.encode(self._request(0).primitives, self._params)
        tokens = [torch.zeros(1, dtype=torch.long, device=self._device) for _ in self._prompts]
        with self._pipeline.evaluating():
            self._pipeline.replay(conditions, TextSegment.pack(tokens=tokens, params=self._params), self._params)


def _tokens(track: RolloutTrack) -> TextSegment:
    if not isinstance(track.segment, TextSegment):
        raise ContractError("the engine answered the canary without tokens")
    return track.segment


class TransitionCanary(Canary):
    """The engine denoises prompts in a few steps, some of them stochastic; the trainer replays those transitions.

    sampling: the recipe's; geometry, guidance and precision are taken from it, steps and noise are the canary's.
    device: of the trainer's weights.
    """

    unit = "nats, reduced as the kernel says"
    default_tolerance: ClassVar[float] = 1e-4
    """The usual clip range of policy gradients on transitions; in fp32 the gap is 0."""
    _num_steps: ClassVar[int] = 4
    _stochastic: ClassVar[tuple[int, ...]] = (1, 2)
    """Steps in the middle, where a prediction is neither all noise nor all image."""
    _eta: ClassVar[float] = 0.5
    """For recipes that sample deterministically; in the range of every kernel."""

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        sampling: DiffusionSamplingParams,
        device: torch.device,
        primitives: Mapping[str, Primitive],
        tolerance: float | None,
    ) -> None:
        super().__init__(primitives, self.default_tolerance if tolerance is None else tolerance)
        self._pipeline = pipeline
        self._device = device
        self._params = dataclasses.replace(
            sampling,
            samples_per_prompt=1,
            num_inference_steps=self._num_steps,
            eta=sampling.eta if sampling.eta > 0 else self._eta,
            scheduler=None,
            sde_indices=list(self._stochastic),
            init_same_noise=False,
            branch_steps=None,
            branch_factors=None,
            one_step=None,
            post_solver="euler",
            post_step_ratio=1.0,
            keep_latents="transitions",
        )

    def _request(self, version: int) -> RolloutReq:
        names = self._names()
        return RolloutReq(
            sample_ids=names,
            group_ids=names,
            primitives=self._primitives,
            sampling_params=self._params,
            sigmas=self._pipeline.sigmas(self._params),
            init_noise_group_ids=noise_keys(version, names, names, same_noise=False),
            init_noise_latent_shape=list(self._pipeline.latent_shape(self._params)),
            rollout_id=version,
        )

    def _gaps(self, track: RolloutTrack) -> Tensor:
        own = track.to(self._device)
        segment = own.segment
        if not isinstance(segment, LatentSegment) or segment.sde_logp is None:
            raise ContractError("the engine answered the canary without latents or log-probs")
        return (self._replayed(own, segment) - segment.sde_logp).abs().cpu()

    def _sample_of(self, track: RolloutTrack, position: int) -> int:
        return position // len(self._stochastic)

    def replay_only(self) -> None:
        req = self._request(0)
        shape = (len(self._prompts), len(self._stochastic) + 2, *self._pipeline.latent_shape(self._params))
        segment = LatentSegment(
            latents=torch.zeros(shape, device=self._device),
            sigmas=self._pipeline.sigmas(self._params),
            indices=[*self._stochastic, self._stochastic[-1] + 1, self._num_steps],
            sde_indices=list(self._stochastic),
            sde_logp=torch.zeros(shape[0], len(self._stochastic), device=self._device),
            params=self._params,
        )
        conditions = self._pipeline.encode(req.primitives, self._params)
        self._replayed(req.make_root_track(conditions=conditions, segment=segment, decoded=None), segment)

    def _replayed(self, track: RolloutTrack, segment: LatentSegment) -> Tensor:
        """Log-probs [B, S], one forward per step with the rows of the rollout; in fp32 on a CPU bit-identical to the
        engine's."""
        rows = torch.arange(track.batch_size)
        with self._pipeline.evaluating():
            steps = [
                self._pipeline.replay(
                    track.conditions, segment, rows, torch.full_like(rows, step), self._params
                ).logp_R.float()
                for step in segment.sde_indices
            ]
        return torch.stack(steps, dim=1)
