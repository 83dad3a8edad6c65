"""What a track holds: the tokens or the latent trajectory of its samples, one row per sample.

Legend: B samples, T denoising steps, K stored positions of the T+1, S stochastic steps, N tokens of all samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from unirl.types.batch import Batch, packed, per_sample, rows_by, shared
from unirl.types.errors import ContractError
from unirl.types.media import Modality
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams


class SegmentStatus(IntEnum):
    """How the generation of a sample ended."""

    PENDING = 0
    COMPLETED = 1
    TRUNCATED = 2
    ABORTED = 3
    FAILED = 4
    """The environment of an episode was lost, and there is no reward."""


@dataclass(kw_only=True, eq=False)
class Segment(Batch):
    """Base of what a track can hold."""

    status: Tensor | None = per_sample(default=None)
    """[B] int64 of SegmentStatus. Absent means that all completed."""


@dataclass(kw_only=True, eq=False)
class TextSegment(Segment):
    """The tokens after each prompt, samples end to end. Build with `TextSegment.pack(tokens=[...], log_probs=[...])`.

    Usually every token was sampled, the one that ended the sample included. Of several turns the segment holds all that
    follows the first prompt: what the model said, and what a tool or user answered, which `loss_mask` leaves out.
    `status` says why a sample ended: COMPLETED by a stop token, TRUNCATED at max_new_tokens, ABORTED by the engine.
    """

    tokens: Tensor = packed()
    """[N] int64."""
    log_probs: Tensor | None = packed(default=None)
    """[N] float32, nats, under the distribution that was sampled from; 0 where a token was not sampled. Absent after
    greedy decoding, which samples from nothing."""
    loss_mask: Tensor | None = packed(default=None)
    """[N] bool, whether a token is trained on. Absent means all. A token that was not sampled must be left out."""
    rewards: Tensor | None = packed(default=None)
    """[N] float32, what an environment gave for a turn, at the last token that the model wrote in it; 0 elsewhere.
    Absent where no environment answers."""
    versions: Tensor | None = packed(default=None)
    """[N] int64, version of the policy that each token was sampled from. Absent: that of the sample
    (`RolloutTrack.policy_versions`)."""
    params: ARSamplingParams | None = shared(default=None)
    """What the tokens were sampled with; replay uses these and no others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens.ndim != 1 or self.tokens.dtype != torch.long:
            raise ContractError(
                f"TextSegment.tokens must be int64 [N], got {self.tokens.dtype} {tuple(self.tokens.shape)}"
            )
        for name, dtype in (
            ("log_probs", torch.float32),
            ("rewards", torch.float32),
            ("loss_mask", torch.bool),
            ("versions", torch.long),
        ):
            value = getattr(self, name)
            if value is not None and (value.ndim != 1 or value.dtype != dtype):
                raise ContractError(f"TextSegment.{name} must be {dtype} [N], got {value.dtype} {tuple(value.shape)}")

    @property
    def trained(self) -> Tensor:
        """[N] bool, the loss mask, or all True where there is none."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.loss_mask is None else self.loss_mask

    def versions_by_token(self, versions_B: Tensor) -> Tensor:
        """[N] int64, `versions`, or where there are none those of the samples, `versions_B` [B]."""
        if self.versions is not None:
            return self.versions
        return versions_B.repeat_interleave(self.lengths.to(versions_B.device))

    def ends_by_version(self, version: int) -> tuple[Tensor, Tensor] | None:
        """[B] int64 each, the policies of the first and the last token; `version` of a sample without tokens. None
        without `versions`."""
        if self.versions is None:
            return None
        own = self.unpack("versions")
        first, last = ([int(each[place]) if len(each) else version for each in own] for place in (0, -1))
        return torch.tensor(first), torch.tensor(last)

    @property
    def is_cut(self) -> Tensor | None:
        """[B] bool: samples that were ended early and can be continued; None if there are none."""
        is_aborted = None if self.status is None else self.status == SegmentStatus.ABORTED
        return is_aborted if is_aborted is not None and bool(is_aborted.any()) else None


@dataclass(kw_only=True, eq=False)
class UnfinishedSteps(Batch):
    """What denoising goes on from that was ended early."""

    reached: Tensor = per_sample()
    """[B] int64: the position that each sample has reached, which is the step that follows; T where it is finished."""
    state: Tensor = per_sample()
    """[B, 1 + H, ...] float32: the latent there, and the H tensors that the solver of the last steps remembers; 0 of
    finished samples."""


@dataclass(kw_only=True, eq=False)
class LatentSegment(Segment):
    """A denoising trajectory. Stored positions: both ends of every stochastic step, and the final latent.

    Where a sample is unfinished, what it has not come to is 0, and `status` is ABORTED.
    """

    modality: Modality = shared(default=Modality.IMAGE)
    latents: Tensor = per_sample()
    """[B, K, ...] stored positions, in the trajectory's storage dtype."""
    sigmas: Tensor = shared()
    """[T+1] float32, decreasing, ending with 0."""
    indices: list[int] = shared()
    """[K] which of the T+1 positions each slot is."""
    sde_indices: list[int] = shared(default_factory=list)
    """[S] which of the T steps were stochastic."""
    sde_logp: Tensor | None = per_sample(default=None)
    """[B, S] float32, nats per latent element (or summed, as the kernel's reduction says)."""
    sde_means: Tensor | None = per_sample(default=None)
    """[B, S, ...] float32 means of the transitions."""
    own_steps: Tensor | None = per_sample(default=None)
    """[B] int64: which of the S steps was the one stochastic step of each sample; the others were Euler's, and their
    log-probs are NaN. Absent: every sample has all of them."""
    versions: Tensor | None = per_sample(default=None)
    """[B, T] int64: version of the policy that took each step, -1 before it is taken. Absent: that of the sample
    (`RolloutTrack.policy_versions`)."""
    unfinished: UnfinishedSteps | None = per_sample(default=None)
    """Absent: all samples are finished."""
    regions: dict[str, Tensor] = per_sample(default_factory=dict)
    """[B, f, h, w] float32 by medium: how much attention the other medium paid to each place of this one while it was
    sampled. The medium's slice of a latent is some such maps, channel after channel. Empty where nothing was noted."""
    params: DiffusionSamplingParams | None = shared(default=None)
    """What the trajectory was sampled with; replay uses these and no others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigmas.ndim != 1 or self.sigmas.dtype != torch.float32:
            raise ContractError(
                f"LatentSegment.sigmas must be float32 [T+1], got {self.sigmas.dtype} {tuple(self.sigmas.shape)}"
            )
        num_positions = self.sigmas.numel()
        if self.latents.ndim < 3 or self.latents.shape[1] != len(self.indices):
            raise ContractError(
                f"LatentSegment.latents {tuple(self.latents.shape)} must be [B, K, ...] with K = {len(self.indices)}, "
                f"the number of indices {self.indices}"
            )
        for name in ("indices", "sde_indices"):
            steps = getattr(self, name)
            if len(set(steps)) != len(steps):
                raise ContractError(f"LatentSegment.{name} repeat a position: {steps}")
        if any(not 0 <= i < num_positions for i in self.indices):
            raise ContractError(f"stored positions {self.indices} must lie in 0..{num_positions - 1}")
        if any(not 0 <= i < num_positions - 1 for i in self.sde_indices):
            raise ContractError(f"stochastic steps {self.sde_indices} must lie in 0..{num_positions - 2}")
        for name in ("sde_logp", "sde_means"):
            value = getattr(self, name)
            if value is not None and value.shape[:2] != (self.latents.shape[0], len(self.sde_indices)):
                raise ContractError(
                    f"LatentSegment.{name} {tuple(value.shape)} must start with [B, S] = "
                    f"[{self.latents.shape[0]}, {len(self.sde_indices)}]"
                )
        flat = {medium: tuple(maps.shape) for medium, maps in self.regions.items() if maps.ndim != 4}
        if flat:
            raise ContractError(f"LatentSegment.regions {flat} must be [B, f, h, w]")
        if self.own_steps is not None and not set(self.own_steps.tolist()) <= set(self.sde_indices):
            raise ContractError(f"own_steps {self.own_steps.tolist()} must be stochastic steps, {self.sde_indices}")
        if self.versions is not None and self.versions.shape != (self.latents.shape[0], self.num_steps):
            raise ContractError(
                f"LatentSegment.versions {tuple(self.versions.shape)} must be [B, T] = "
                f"[{self.latents.shape[0]}, {self.num_steps}]"
            )

    @classmethod
    def _align(cls, parts: list[Self]) -> list[Self]:
        """Where some shards have unfinished samples, the others say that theirs are finished."""
        states = [part.unfinished.state for part in parts if part.unfinished is not None]
        return [part._with_endings(states[0]) for part in parts] if states else parts

    def _with_endings(self, state: Tensor) -> Self:
        if self.unfinished is not None:
            return self
        nothing = state.new_zeros((self.batch_size, *state.shape[1:]))
        done = UnfinishedSteps(reached=self.reached.to(state.device), state=nothing)
        ended = torch.full((self.batch_size,), SegmentStatus.COMPLETED, device=state.device)
        return self.replace(unfinished=done, status=ended if self.status is None else self.status)

    @property
    def reached(self) -> Tensor:
        """[B] int64 on the CPU: the position 0..T that each sample has reached."""
        if self.unfinished is not None:
            return self.unfinished.reached.cpu()
        return torch.full((self.batch_size,), self.num_steps)

    def versions_by_step(self, versions_B: Tensor) -> Tensor:
        """[B, T] int64 on the CPU, `versions`, or where there are none those of the samples, `versions_B` [B]; -1 of
        steps that are not taken."""
        if self.versions is not None:
            return self.versions.cpu()
        is_taken = torch.arange(self.num_steps) < self.reached[:, None]
        return torch.where(is_taken, versions_B.cpu()[:, None], -1)

    def ends_by_version(self, version: int) -> tuple[Tensor, Tensor] | None:
        """[B] int64 each on the CPU, the policies of the first and the last step; `version` of a sample without steps.
        None without `versions`."""
        if self.versions is None:
            return None
        versions, is_begun = self.versions.cpu(), self.reached > 0
        last = versions.gather(1, (self.reached - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(is_begun, versions[:, 0], version), torch.where(is_begun, last, version)

    @property
    def is_cut(self) -> Tensor | None:
        """[B] bool on the CPU: samples that were ended early and can be continued; None if all ran to their end in one
        call."""
        return None if self.unfinished is None else self.reached < self.num_steps

    @property
    def num_steps(self) -> int:
        """T, the number of denoising steps."""
        return self.sigmas.numel() - 1

    def slot_of(self, position: int) -> int:
        """Slot that stores trajectory position `position` (0..T). Raises KeyError when it was not stored."""
        try:
            return self.indices.index(position)
        except ValueError:
            raise KeyError(f"position {position} was not stored; stored positions are {self.indices}") from None

    def latents_at(self, position: int) -> Tensor:
        """Latents [B, ...] at trajectory position 0..T (a view). Raises KeyError when it was not stored."""
        return self.latents[:, self.slot_of(position)]

    @property
    def clean_latents(self) -> Tensor:
        """Final latents [B, ...], at sigma = 0."""
        return self.latents_at(self.num_steps)

    def transitions(self, sample_R: Tensor, step_R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows of stored transitions: (x_R, next_R, sigma_R, sigma_next_R).

        sample_R, step_R: int64 [R]. Raises KeyError for a step whose two ends were not stored, ContractError for one
        that is not its sample's own.
        """
        if self.own_steps is not None and not torch.equal(self.own_steps.cpu()[sample_R.cpu()], step_R.cpu()):
            raise ContractError(f"rows ask for steps that are not their samples' own, {self.own_steps.tolist()}")
        slots = {i: slot for slot, i in enumerate(self.indices)}
        steps = step_R.tolist()
        missing = sorted({step for step in steps if step not in slots or step + 1 not in slots})
        if missing:
            raise KeyError(f"steps {missing} were not stored; stored positions are {self.indices}")
        device = self.latents.device
        sample_R, step_R = sample_R.to(device), step_R.to(device)
        start = torch.tensor([slots[step] for step in steps], device=device)
        end = torch.tensor([slots[step + 1] for step in steps], device=device)
        sigmas = self.sigmas.to(device)
        return (
            self.latents[sample_R, start],
            self.latents[sample_R, end],
            sigmas[step_R],
            sigmas[step_R + 1],
        )

    def sized(self) -> SizedLatents:
        """The same trajectories in the form that allows different sizes. Raises ContractError if it has no params,
        whose height and width are the size."""
        if self.params is None:
            raise ContractError("a trajectory without params has no size in pixels; the engine must set its params")
        return SizedLatents(
            status=self.status,
            modality=self.modality,
            latents=list(self.latents),
            sizes=[(self.params.height, self.params.width)] * self.batch_size,
            sigmas=self.sigmas,
            indices=self.indices,
            sde_indices=self.sde_indices,
            sde_logp=self.sde_logp,
            sde_means=None if self.sde_means is None else list(self.sde_means),
            own_steps=self.own_steps,
            versions=self.versions,
            params=self.params,
        )


@dataclass(kw_only=True, eq=False)
class SizedLatents(Segment):
    """Denoising trajectories of images that each have their own size, on one schedule with the same stochastic steps.

    `RolloutTrack.by_size` takes a track of them apart into ordinary ones, which is how they are scored and trained on.
    """

    modality: Modality = shared(default=Modality.IMAGE)
    latents: list[Tensor] = per_sample(default_factory=list)
    """Per sample the stored positions [K, C, h, w]."""
    sizes: list[tuple[int, int]] = per_sample(default_factory=list)
    """Height and width of each image in pixels."""
    sigmas: Tensor = shared()
    """[T+1] float32, see `LatentSegment`."""
    indices: list[int] = shared()
    """[K], see `LatentSegment`."""
    sde_indices: list[int] = shared(default_factory=list)
    """[S], see `LatentSegment`."""
    sde_logp: Tensor | None = per_sample(default=None)
    """[B, S] float32, see `LatentSegment`."""
    sde_means: list[Tensor] | None = per_sample(default=None)
    """Per sample [S, C, h, w], see `LatentSegment`."""
    own_steps: Tensor | None = per_sample(default=None)
    """[B], see `LatentSegment`."""
    versions: Tensor | None = per_sample(default=None)
    """[B, T], see `LatentSegment`."""
    params: DiffusionSamplingParams | None = shared(default=None)
    """What the trajectories were sampled with but for the size: height and width are those of an image whose size
    was not chosen."""

    def rows_by_size(self) -> list[list[int]]:
        """The samples of each size, sizes in order of first appearance."""
        return list(rows_by(self.sizes).values())

    def of_one_size(self) -> LatentSegment:
        """The same where all have one size, which its params name. Raises ContractError if sizes differ."""
        if len(set(self.sizes)) != 1 or self.params is None:
            raise ContractError(f"these trajectories have the sizes {sorted(set(self.sizes))}; take them apart by size")
        height, width = self.sizes[0]
        return LatentSegment(
            status=self.status,
            modality=self.modality,
            latents=torch.stack(self.latents),
            sigmas=self.sigmas,
            indices=self.indices,
            sde_indices=self.sde_indices,
            sde_logp=self.sde_logp,
            sde_means=None if self.sde_means is None else torch.stack(self.sde_means),
            own_steps=self.own_steps,
            versions=self.versions,
            params=replace(self.params, height=height, width=width),
        )
