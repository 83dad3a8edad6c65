"""Scouts (Sol-RL, arXiv 2604.06916): many cheap candidates of a prompt, of which the best and the worst are made again
exactly.

A sample's noise is named after its id, so a scout with fewer steps or lower precision starts where the exact sample of
the same id does. Which of them are made again is decided on the driver; nothing of a scout but its reward is kept.
Legend: B scouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from unirl.algorithms.selection import extremes, rank_agreement
from unirl.config.schema import Scouts
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.trainer.clock import PhaseClock
from unirl.trainer.modality import ParamsT
from unirl.trainer.roles import DiffusionEngineRole
from unirl.types.errors import ContractError
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams


@dataclass
class _Found:
    """What the scouts of one rollout have shown."""

    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    """By sample id; NaN where a scout could not be scored."""
    before: tuple[float, float] = (0.0, 0.0)
    """Wall and CPU seconds of sampling and scoring before the rollout."""
    wall_s: float = 0.0
    cpu_s: float = 0.0


class Scouting:
    """Asks for scouts and names the samples that are worth making exactly."""

    def __init__(self, runtime: Runtime, scouts: Scouts, clock: PhaseClock) -> None:
        self._runtime = runtime
        self._scouts = scouts
        self._clock = clock
        self._found: dict[int, _Found] = {}
        """By rollout, until its metrics are taken."""

    def candidates(self, sampling: ParamsT) -> ParamsT:
        """The run's sampling with as many samples per prompt as there are scouts."""
        return dataclasses.replace(sampling, samples_per_prompt=self._scouts.per_prompt)

    def chosen(
        self, candidates: RolloutReq, samples_per_prompt: int, scored: Callable[[RolloutReq], tuple[Held, object]]
    ) -> RolloutReq:
        """A request for the `samples_per_prompt` / 2 best and worst of each prompt, given one for all candidates.

        scored: samples of a request with their rewards; the scouts are released.
        """
        before = self._spent()
        found = self._found.setdefault(candidates.rollout_id, _Found(before=before))
        held, _ = scored(self._cheap(candidates))
        with held:
            track = held.meta.root_track()
        wall, cpu = self._spent()
        found.wall_s += wall - before[0]
        found.cpu_s += cpu - before[1]
        rewards_B = track.scored_rewards.double()
        found.rewards.update(zip(track.sample_ids, rewards_B.tolist(), strict=True))
        rows = extremes(rewards_B, track.group_ids, samples_per_prompt)
        exact = dataclasses.replace(_params(candidates), samples_per_prompt=samples_per_prompt)
        return candidates.select(rows).replace(sampling_params=exact)

    def metrics(self, rollout_id: int, track: RolloutTrack) -> dict[str, float]:
        """What a rollout's scouts cost and how well they ranked its samples. track: exact, with rewards."""
        found = self._found.pop(rollout_id)
        known = [reward for reward in found.rewards.values() if reward == reward]
        scouted = track.scored_rewards.new_tensor([found.rewards[name] for name in track.sample_ids])
        agreement = rank_agreement(scouted, track.scored_rewards, track.group_ids)
        return {
            **({"scouts/reward_mean": sum(known) / len(known)} if known else {}),
            **({} if agreement is None else {"scouts/rank_agreement": agreement}),
            "scouts/count": float(len(found.rewards)),
            "scouts/wall_s": found.wall_s,
            "scouts/cpu_s": found.cpu_s,
            "scouts/exact_cpu_s": self._spent()[1] - found.before[1] - found.cpu_s,
        }

    def _spent(self) -> tuple[float, float]:
        """Wall and CPU seconds of the phases in which samples are made and scored."""
        wall, cpu = (
            sum(kind.get(name, 0.0) for name in ("rollout", "reward"))
            for kind in (self._clock.wall_s, self._clock.cpu_s)
        )
        return wall, cpu

    def _cheap(self, candidates: RolloutReq) -> RolloutReq:
        """The same samples with the steps and the precision of scouts."""
        own, params = self._scouts, _params(candidates)
        cheap = dataclasses.replace(
            params,
            num_inference_steps=own.num_inference_steps or params.num_inference_steps,
            autocast_precision=own.autocast_precision or params.autocast_precision,
            keep_latents="last",
        )
        plan = self._runtime.role("engine", DiffusionEngineRole).plan(cheap)
        return candidates.replace(sampling_params=cheap, sigmas=plan.sigmas)


def _params(req: RolloutReq) -> DiffusionSamplingParams:
    if not isinstance(req.sampling_params, DiffusionSamplingParams):
        raise ContractError(f"scouts denoise, and this request samples by {type(req.sampling_params).__name__}")
    return req.sampling_params
