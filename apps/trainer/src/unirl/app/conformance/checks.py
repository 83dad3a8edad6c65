"""What is measured of an engine that runs: each check is a number or a claim that held, and nothing is taken on trust.

A claim that does not hold is `False`; a number is a largest difference. What cannot be asked is `NotApplicable`.
Legend: B samples, S stochastic steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import ks_2samp, mannwhitneyu
from torch import Tensor

from unirl.config import instantiate
from unirl.distributed.runtime import LocalRuntime
from unirl.rollout.checks import diffusion_params, noise_recipe, starting_latents, step_noise_keys
from unirl.trainer.base import Trainer
from unirl.trainer.build.worker import LATENTS_OF_TRAINER, TEXTS_OF_TRAINER
from unirl.types.copies import Copies
from unirl.types.errors import ContractError
from unirl.types.recipe import TARGET
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment, TextSegment

Measured = bool | float
_REQUESTS_OF_REWARDS = 8
"""Each has 2 prompts: together 64 images or 256 texts."""
_LEVEL = 1e-3


@dataclass(frozen=True)
class NotApplicable:
    """A check that means nothing here."""

    reason: str


@dataclass(frozen=True)
class Running:
    """A built case: its components are those of a run. Any: what its recipe names."""

    runtime: LocalRuntime
    trainer: Trainer
    engine: Any
    pipeline: Any
    backend: Any

    @classmethod
    def of(cls, runtime: LocalRuntime, trainer: Trainer) -> Running:
        """The parts of a local run that are asked directly."""
        parts = (runtime.component(name) for name in ("engine", "pipeline", "backend"))
        return cls(runtime, trainer, *parts)

    def request(self, rollout_id: int, **changes: Any) -> RolloutReq:  # Any: fields of the sampling parameters
        """A request of the run's data, with other sampling where `changes` says so."""
        req = self.trainer.collector.request(rollout_id, 2)
        params: Any = req.sampling_params  # Any: of the run's modality
        return dataclasses.replace(req, sampling_params=dataclasses.replace(params, **changes))

    def sampled(self, req: RolloutReq, policy: Copies = None) -> RolloutTrack:
        """The root track of the engine's answer."""
        return self.engine.generate(req, policy).root_track()


def learns(run: Running) -> Measured:
    """Passes if two steps change what trains, with finite metrics and a first ratio of 1."""
    before = [parameter.detach().clone() for parameter in run.backend.parameters.values()]
    run.trainer.prepare()
    for rollout_id in range(2):
        metrics = run.trainer.step(rollout_id)
        if not all(math.isfinite(value) for value in metrics.values()):
            return False
        if metrics.get("policy/first_ratio_max_abs_dev", 0.0) > 1e-4:
            return False
    pairs = zip(before, run.backend.parameters.values(), strict=True)
    return any(not torch.equal(old, new) for old, new in pairs)


def push_gap(run: Running) -> Measured | NotApplicable:
    """Largest |log-prob of the engine - of the trainer| of the samples that prove a push of the present weights."""
    if not run.runtime.has_role("sync"):
        return NotApplicable("samples with the weights that train")
    sync: Any = run.runtime.component("sync")
    return float(sync.push()["sync/logprob_gap_max"])


def named_policy(run: Running) -> Measured | NotApplicable:
    """Largest difference between the samples of a named policy and those of the trainer's model with its weights."""
    name = run.trainer.collector.rollout_policy
    if name is None:
        return NotApplicable("the algorithm samples from the policy that trains")
    req = run.request(90, keep_latents="all")
    if run.runtime.has_role("sync"):
        sync: Any = run.runtime.component("sync")
        sync.push(name)
    found = latents_of(run.sampled(req, name)).clean_latents
    with run.backend.using_policy(name), run.pipeline.evaluating():
        expected = _direct(run, req)
    return float((found - expected).abs().max())


def reward_parity(run: Running) -> Measured | NotApplicable:
    """Passes if the rewards of the engine's samples are distributed as those of the trainer's model, of the same
    requests and weights: equal log-probs of an engine's samples do not say that it draws them as often.

    The engine has the present policy.
    """
    if not run.runtime.has_role("sync"):
        return NotApplicable("samples with the weights that train")
    requests = [run.request(60 + number) for number in range(_REQUESTS_OF_REWARDS)]
    engine = [run.engine.generate(req, None) for req in requests]
    first = engine[0].root_track()
    target = TEXTS_OF_TRAINER if isinstance(first.segment, TextSegment) else LATENTS_OF_TRAINER
    offered = {"pipeline": run.pipeline, "policies": run.backend, "forward_batch_size": first.batch_size}
    trainer = instantiate({TARGET: target}, **offered, track=engine[0].root_name())
    own = [trainer.generate(req, None) for req in requests]
    return same_distribution(_rewards(run, engine), _rewards(run, own))


def same_distribution(one: Sequence[float], other: Sequence[float]) -> bool:
    """True unless a test of Mann and Whitney (another location, many equal values) or of Kolmogorov and Smirnov
    (another shape) says that two samples are of different distributions, at a level of `_LEVEL`."""
    return all(test(one, other).pvalue >= _LEVEL for test in (mannwhitneyu, ks_2samp))


def _rewards(run: Running, responses: Sequence[RolloutResp]) -> list[float]:
    """Rewards of the root track of all responses."""
    reward: Any = run.runtime.component("reward")
    found: list[float] = []
    for resp in responses:
        reward.score_track(resp, resp.root_name(), is_training=False)
        rewards = resp.root_track().rewards
        if rewards is None:
            raise ContractError("the reward scored nothing")
        found += [float(each) for each in rewards]
    return found


def engine_checks(run: Running, *, shows_media: bool) -> Iterator[tuple[str, Measured | NotApplicable]]:
    """Everything that is measured of samples, by name. The engine has the present policy."""
    req = run.request(50)
    track = run.sampled(req)
    yield "sampled", track.sample_ids == req.sample_ids
    yield "log-prob gap", float(replay_gap(run.pipeline, track).max())
    if isinstance(track.segment, TextSegment):
        text = NotApplicable("no denoising steps")
        yield from dict.fromkeys(("sigmas", "latents", "initial latents", "step subsets"), text).items()
    else:
        yield from _latent_checks(run, req, track)
    if not shows_media:
        yield "media", NotApplicable("the model is given text alone")
        return
    # The same noise, another image: other samples, or the image was ignored.
    slot = next(name for name in req.primitives if name != "text")
    turned = {**req.primitives, slot: req.primitives[slot].select(list(range(req.batch_size))[::-1])}
    yield "media", not _same(track, run.sampled(dataclasses.replace(req, primitives=turned)))


def _latent_checks(run: Running, req: RolloutReq, track: RolloutTrack) -> Iterator[tuple[str, Measured]]:
    segment = latents_of(track)
    steps = range(diffusion_params(req).num_inference_steps)
    yield "sigmas", req.sigmas is not None and torch.equal(segment.sigmas, req.sigmas)
    ends = {end for step in segment.sde_indices for end in (step, step + 1)}
    yield "latents", segment.sde_indices == list(steps) and ends <= set(segment.indices)
    whole = run.request(51, keep_latents="all")
    start = starting_latents(noise_recipe(whole, diffusion_params(whole)))
    yield "initial latents", torch.equal(latents_of(run.sampled(whole)).latents[:, 0].cpu(), start)
    some = run.request(52, scheduler=None, sde_indices=[1])
    found = latents_of(run.sampled(some))
    yield "step subsets", found.sde_indices == [1] and found.sde_logp is not None and found.sde_logp.shape[1] == 1


def replay_gap(pipeline: Any, track: RolloutTrack) -> Tensor:  # Any: of the samples' kind
    """|log-prob of the engine - of a replay|, [B, S] or one per token."""
    with pipeline.evaluating(), torch.no_grad():
        if isinstance(track.segment, TextSegment):
            segment = track.segment
            return (
                pipeline.replay(track.conditions, segment, segment.params).logp_N - _present(segment.log_probs)
            ).abs()
        latents, rows = latents_of(track), torch.arange(track.batch_size)
        steps = [
            pipeline.replay(track.conditions, latents, rows, torch.full_like(rows, step), latents.params).logp_R
            for step in latents.sde_indices
        ]
        return (torch.stack(steps, dim=1) - _present(latents.sde_logp)).abs()


def latents_of(track: RolloutTrack) -> LatentSegment:
    """The track's segment."""
    if not isinstance(track.segment, LatentSegment):
        raise ContractError(f"expected latents, found {type(track.segment).__name__}")
    return track.segment


def _present(log_probs: Tensor | None) -> Tensor:
    """Log-probs of samples that must have them."""
    if log_probs is None:
        raise ContractError("the engine returned no log-probs")
    return log_probs


def _direct(run: Running, req: RolloutReq) -> Tensor:
    """Final latents of the trainer's model as it is now."""
    params = diffusion_params(req)
    start = starting_latents(noise_recipe(req, params))
    with torch.no_grad():
        conditions = run.pipeline.encode(req.primitives, params)
        segment = run.pipeline.diffuse(conditions, start, req.sigmas, params, noise_keys=step_noise_keys(req))
    return segment.clean_latents


def _same(one: RolloutTrack, other: RolloutTrack) -> bool:
    first, second = one.segment, other.segment
    if isinstance(first, TextSegment) and isinstance(second, TextSegment):
        return torch.equal(_present(first.log_probs), _present(second.log_probs))
    return torch.equal(latents_of(one).clean_latents, latents_of(other).clean_latents)
