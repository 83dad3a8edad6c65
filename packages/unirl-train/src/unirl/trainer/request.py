"""Makes rollout requests from prompt rows: ids, repetition, pinned sigmas, noise ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from unirl.data.data_source import PromptRow
from unirl.data.datasets import AUDIO
from unirl.data.media import SLOTS
from unirl.data.pictures import prompt_pictures
from unirl.data.sounds import prompt_sounds
from unirl.distributed.runtime import Runtime
from unirl.sde.schedule import compressed_tail
from unirl.trainer.own_steps import deal_steps
from unirl.trainer.roles import DiffusionEngineRole, StagesEngineRole
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Primitive, Texts
from unirl.types.noise import noise_keys
from unirl.types.rollout import DiffusionPlan, RolloutReq
from unirl.types.sampling import (
    ActionSamplingParams,
    ARSamplingParams,
    BaseSamplingParams,
    DiffusionSamplingParams,
    StagedSamplingParams,
)


def unique_ids(ids: Sequence[str]) -> list[str]:
    """The ids, with `#k` appended to the k-th repetition of one (or the next free k, if such ids exist)."""
    taken = set(ids)
    seen: dict[str, int] = {}
    unique = []
    for name in ids:
        if name not in seen:
            seen[name] = 0
            unique.append(name)
            continue
        seen[name] += 1
        while f"{name}#{seen[name]}" in taken:
            seen[name] += 1
        unique.append(f"{name}#{seen[name]}")
        taken.add(unique[-1])
    return unique


def shortened(params: DiffusionSamplingParams, sigmas: Tensor) -> tuple[DiffusionSamplingParams, Tensor]:
    """Parameters and sigmas with the steps after the last stochastic one compressed by `post_step_ratio`.

    params: resolved for this rollout. Without stochastic steps, or with ratio 1, both are returned unchanged.
    """
    if params.post_step_ratio == 1 or not params.sde_indices:
        return params, sigmas
    start = max(params.sde_indices) + 1
    if start >= params.num_inference_steps:
        return params, sigmas
    kept = compressed_tail(sigmas, start, params.post_step_ratio)
    return dataclasses.replace(params, num_inference_steps=kept.numel() - 1), kept


def inputs_of(rows: Sequence[PromptRow]) -> dict[str, Primitive]:
    """Model inputs of the rows, one entry per row: texts, and images, video frames and audio in the slots of
    `unirl.data.media.SLOTS`, which a model reads or refuses.

    Raises DataError for an image that can no longer be read.
    """
    primitives: dict[str, Primitive] = {"text": Texts(texts=[row.prompt for row in rows])}
    for kind, slot in SLOTS.items():
        pictures = [[ref for ref in row.media if (ref.modality, ref.role) == kind] for row in rows]
        if any(pictures):
            primitives[slot] = prompt_sounds(pictures) if slot == AUDIO else prompt_pictures(pictures)
    return primitives


def repeated(rows: Sequence[PromptRow], repeats: int) -> dict[str, Any]:  # Any: fields of different types
    """Request fields of any modality for `repeats` consecutive samples of every row.

    Ids: group `prompt:{id}`, sample `{group}:sample:{j}`; a prompt that occurs twice gets two groups. Inputs and
    errors: see `inputs_of`.
    """
    groups = unique_ids([f"prompt:{row.prompt_id}" for row in rows])
    return {
        "sample_ids": [f"{group}:sample:{j}" for group in groups for j in range(repeats)],
        "group_ids": [group for group in groups for _ in range(repeats)],
        "primitives": {slot: value.repeat_interleave(repeats) for slot, value in inputs_of(rows).items()},
        "metadata": [row.metadata for row in rows for _ in range(repeats)],
    }


def build_text_request(rows: Sequence[PromptRow], params: ARSamplingParams, *, rollout_id: int) -> RolloutReq:
    """A request for completions, `params.samples_per_prompt` of every row; see `repeated` for ids and inputs."""
    return RolloutReq(**repeated(rows, params.samples_per_prompt), sampling_params=params, rollout_id=rollout_id)


def build_request(
    rows: Sequence[PromptRow],
    params: DiffusionSamplingParams,
    *,
    sigmas: Tensor,
    latent_shape: tuple[int, ...],
    rollout_id: int,
) -> RolloutReq:
    """A request with `params.samples_per_prompt` samples of every row; see `repeated` for ids and inputs.

    params: resolved for this rollout (with explicit stochastic steps).
    """
    fields = repeated(rows, params.samples_per_prompt)
    return RolloutReq(
        **fields,
        sampling_params=params,
        sigmas=sigmas,
        init_noise_group_ids=noise_keys(
            rollout_id, fields["sample_ids"], fields["group_ids"], same_noise=params.init_same_noise
        ),
        init_noise_latent_shape=list(latent_shape),
        own_steps=deal_steps(fields["group_ids"], params, rollout_id),
        rollout_id=rollout_id,
    )


def build_staged_request(
    rows: Sequence[PromptRow], params: StagedSamplingParams, plans: Mapping[str, DiffusionPlan], *, rollout_id: int
) -> RolloutReq:
    """A request whose rows are the first stage's, `params.samples_per_prompt` of each prompt; see `repeated` for ids
    and inputs. The noise of later stages is derived from their sample ids.

    params: resolved for this rollout (with explicit stochastic steps). plans: of the diffusion stages.
    """
    return RolloutReq(
        **repeated(rows, params.samples_per_prompt), sampling_params=params, plans=dict(plans), rollout_id=rollout_id
    )


def pinned_request(
    runtime: Runtime, rows: Sequence[PromptRow], params: BaseSamplingParams, rollout_id: int
) -> RolloutReq:
    """A request for samples of some prompts, with this rollout's stochastic steps, sigmas and noise ids. Raises
    ContractError for unknown sampling parameters."""
    if isinstance(params, ARSamplingParams):
        return build_text_request(rows, params, rollout_id=rollout_id)
    if isinstance(params, ActionSamplingParams):
        return RolloutReq(**repeated(rows, params.samples_per_prompt), sampling_params=params, rollout_id=rollout_id)
    if isinstance(params, DiffusionSamplingParams):
        resolved, sigmas, shape = _pinned(runtime, params, rollout_id)
        return build_request(rows, resolved, sigmas=sigmas, latent_shape=shape, rollout_id=rollout_id)
    if isinstance(params, StagedSamplingParams):
        return _staged_request(runtime, rows, params, rollout_id)
    raise ContractError(f"no request is known of samples by {type(params).__name__}")


def _pinned(
    runtime: Runtime, params: DiffusionSamplingParams, rollout_id: int
) -> tuple[DiffusionSamplingParams, Tensor, tuple[int, ...]]:
    """Parameters with the steps of this rollout, their sigmas, and the shape of one latent."""
    resolved = params.resolved(rollout_id)
    plan = runtime.role("engine", DiffusionEngineRole).plan(resolved)
    return *shortened(resolved, plan.sigmas), plan.latent_shape


def _staged_request(
    runtime: Runtime, rows: Sequence[PromptRow], params: StagedSamplingParams, rollout_id: int
) -> RolloutReq:
    stages = {
        track: own.resolved(rollout_id) if isinstance(own, DiffusionSamplingParams) else own
        for track, own in params.stages.items()
    }
    plans = runtime.role("engine", StagesEngineRole).plans(StagedSamplingParams(stages=stages))
    for track, plan in plans.items():
        own = stages[track]
        assert isinstance(own, DiffusionSamplingParams)  # noqa: S101 - only these have plans
        if own.one_step is not None:
            raise ConfigError(
                f"stages.{track}.sampling.one_step = {own.one_step}: where several stages sample, the samples of a "
                "stage have the same stochastic steps. Set it to null."
            )
        stages[track], sigmas = shortened(own, plan.sigmas)
        plans[track] = dataclasses.replace(plan, sigmas=sigmas)
    return build_staged_request(rows, StagedSamplingParams(stages=stages), plans, rollout_id=rollout_id)
