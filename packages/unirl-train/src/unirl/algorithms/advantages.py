"""Advantages of a whole batch, as pure functions with every convention explicit.

Reference implementations differ in scope, ddof and epsilon; the presets are named after them (`PRESETS`). Rewards are
gathered over all devices before they are normalised, so the number of devices never changes the result.
Legend: B samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from unirl.algorithms.advantage_presets import PRESETS
from unirl.algorithms.schedules import LinearWeight
from unirl.types.bounds import Bounds, NonNegative, PositiveOrInf, bounded
from unirl.types.errors import ConfigError, ContractError

Scope = Literal["group", "batch", "none"]
Scale = Literal["group", "batch", "residual", "mean", "none"]
Statistics = Literal["samples", "tokens"]
MultiReward = Literal["weighted_sum", "normalize_then_sum", "gdpo"]


def group_index(group_ids: Sequence[str]) -> Tensor:
    """int64 [B]: which group each sample is in, numbered by first appearance. Groups need not be contiguous."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(group, len(numbers)) for group in group_ids], dtype=torch.long)


def group_mean(values_B: Tensor, index_B: Tensor) -> Tensor:
    """Mean of each sample's group, [B]."""
    num_groups = int(index_B.max()) + 1
    sums = torch.zeros(num_groups, dtype=values_B.dtype).index_add_(0, index_B, values_B)
    counts = torch.bincount(index_B, minlength=num_groups).to(values_B.dtype)
    return (sums / counts)[index_B]


def group_std(values_B: Tensor, index_B: Tensor, ddof: int) -> Tensor:
    """Standard deviation of each sample's group, [B]; 0 for a group of `ddof` or fewer samples."""
    deviation = values_B - group_mean(values_B, index_B)
    num_groups = int(index_B.max()) + 1
    squares = torch.zeros(num_groups, dtype=values_B.dtype).index_add_(0, index_B, deviation.square())
    counts = torch.bincount(index_B, minlength=num_groups).to(values_B.dtype)
    return (squares / (counts - ddof).clamp(min=1)).sqrt()[index_B]


def trimmed(values_B: Tensor, index_B: Tensor, trim: int) -> tuple[Tensor, Tensor]:
    """Values and group numbers of the samples that are left without the `trim` lowest and highest of each group.

    Raises ConfigError for a group of which nothing would be left.
    """
    order = values_B.argsort(stable=True)
    order = order[index_B[order].argsort(stable=True)]  # group by group, ascending inside
    sizes = torch.bincount(index_B)
    if int(sizes.min()) <= 2 * trim:
        raise ConfigError(
            f"advantages.trim = {trim} leaves nothing of a group of {int(sizes.min())} samples: it takes that many "
            "lowest and highest away. Lower it, or raise sampling.samples_per_prompt."
        )
    starts = sizes.cumsum(0) - sizes
    rank = torch.arange(len(order)) - starts[index_B[order]]
    kept = order[(rank >= trim) & (rank < sizes[index_B[order]] - trim)]
    return values_B[kept], index_B[kept]


def trimmed_statistics(values_B: Tensor, index_B: Tensor, trim: int, ddof: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each sample's group without its extremes, [B] each, see `trimmed`.

    A group that has no spread without them has the deviation of all its samples, so that one that stands out alone is
    not divided by 0.
    """
    values, index = trimmed(values_B, index_B, trim)
    num_groups = int(index_B.max()) + 1
    mean_G, std_G = values_B.new_zeros(num_groups), values_B.new_zeros(num_groups)
    mean_G[index], std_G[index] = group_mean(values, index), group_std(values, index, ddof)
    std_B = std_G[index_B]
    return mean_G[index_B], torch.where(std_B > 0, std_B, group_std(values_B, index_B, ddof))


def finite_rewards(rewards_B: Tensor, num_samples: int) -> Tensor:
    """The rewards in float64 on the CPU. Raises ContractError for non-finite ones or another number of samples."""
    if rewards_B.shape != (num_samples,):
        raise ContractError(f"rewards {tuple(rewards_B.shape)} must be [B] with B = {num_samples} group ids")
    if not bool(torch.isfinite(rewards_B).all()):
        bad = [i for i, ok in enumerate(torch.isfinite(rewards_B).tolist()) if not ok]
        raise ContractError(f"rewards of samples {bad[:8]} are not finite: {rewards_B[bad[:8]].tolist()}")
    return rewards_B.detach().to("cpu", torch.float64)


def is_constant(values_B: Tensor, index_B: Tensor) -> Tensor:
    """bool [B]: whether all values of a sample's group are equal."""
    num_groups = int(index_B.max()) + 1
    empty = torch.zeros(num_groups, dtype=values_B.dtype)
    low, high = (empty.scatter_reduce(0, index_B, values_B, how, include_self=False) for how in ("amin", "amax"))
    return (low == high)[index_B]


ALWAYS_DIVISIBLE = (
    ("group", "group"),
    ("group", "batch"),
    ("group", "residual"),
    ("group", "mean"),
    ("batch", "batch"),
    ("batch", "residual"),
)
"""(center, scale) under which a divisor of 0 leaves nothing to divide: all centred rewards are 0 too."""


def check_eps(eps: float, center: str, scale: str) -> None:
    """Raises ConfigError for an `eps` that is not positive if a standard deviation of 0 would divide something."""
    if not 0 <= eps < math.inf:
        raise ConfigError(f"advantages.eps = {eps} must be a number of at least 0")
    if eps == 0 and scale != "none" and (center, scale) not in ALWAYS_DIVISIBLE:
        raise ConfigError(
            f"advantages.eps = 0 with center = {center} and scale = {scale} divides by 0 where all rewards are equal. "
            "Set advantages.eps: 1.0e-8, or the same center as scale."
        )


def check_trim(trim: int, center: str, scale: str, *, is_plain: bool) -> None:
    """Raises ConfigError for a `trim` that has no group's mean to change."""
    if trim < 0:
        raise ConfigError(f"advantages.trim = {trim} must be at least 0")
    if trim and (center != "group" or scale == "mean" or not is_plain):
        raise ConfigError(
            f"advantages.trim = {trim} leaves extremes out of a group's mean and deviation, over samples. Set center: "
            "group, scale: group, batch, residual or none, leave_one_out: false and statistics: samples; or trim: 0."
        )


def normalized_advantages(
    rewards_B: Tensor,
    group_ids: Sequence[str],
    *,
    center: Scope,
    scale: Scale,
    ddof: int,
    eps: float,
    eps_inside_sqrt: bool = False,
    leave_one_out: bool = False,
    clip: float | None = None,
    statistics: Statistics = "samples",
    num_tokens_B: Tensor | None = None,
    trim: int = 0,
) -> Tensor:
    """(reward - centre) / (std + eps), float32 [B], computed in float64.

    center, scale: over the sample's group, over the batch, or not at all. scale "residual" is the standard deviation
        over the batch of what is left after centring; "mean" divides by the group's mean instead, of rewards of at
        least 0, with center "group" (MaxRL, arXiv 2602.02710).
    leave_one_out: the centre of a sample is the mean of the OTHERS, which makes G / (G - 1) (reward - mean) of G.
    ddof: 0 is the population standard deviation, 1 the sample standard deviation.
    eps_inside_sqrt: divide by sqrt(var + eps) instead.
    clip: half-width of the range kept, in standard deviations.
    statistics: what mean and deviation over the batch count. "tokens" repeats each sample's value at every one of its
        `num_tokens_B` trained tokens, so that the advantages of all tokens sum to 0; a group's mean counts samples.
    trim: mean, and deviation where it is the group's, leave this many lowest and highest samples of each group out.
    A group (center = batch: a batch) whose rewards are all equal gets exactly 0, whatever eps is. Raises ContractError
    for non-finite rewards or wrong sizes, ConfigError for an eps of 0 where that rule does not save the division.
    Over tokens that holds for a batch without any spread alone.
    """
    check_eps(eps, center, scale)
    check_trim(trim, center, scale, is_plain=statistics == "samples" and not leave_one_out)
    rewards = finite_rewards(rewards_B, len(group_ids))
    index = group_index(group_ids)
    if statistics == "tokens":
        if num_tokens_B is None or num_tokens_B.shape != rewards.shape:
            raise ContractError(f"statistics = tokens needs the number of tokens of each of {len(group_ids)} samples")
        own = rewards
        if center == "group":
            own = torch.where(is_constant(rewards, index), 0.0, rewards - group_mean(rewards, index))
        advantages = whitened_over_tokens(own, num_tokens_B, ddof=ddof, eps=eps)
        return (advantages if clip is None else advantages.clamp(-clip, clip)).to(torch.float32)
    whole = torch.zeros_like(index)
    scopes = {"group": index, "batch": whole}
    own_mean, own_std = trimmed_statistics(rewards, index, trim, ddof) if trim else (None, None)
    if own_mean is not None:
        advantages = rewards - own_mean
    else:
        advantages = rewards - group_mean(rewards, scopes[center]) if center != "none" else rewards
    if leave_one_out and center != "none":
        size = torch.bincount(scopes[center])[scopes[center]].to(torch.float64)
        advantages = advantages * size / (size - 1).clamp(min=1)
    if scale == "mean":
        advantages = advantages / (_mean_of_positive(rewards, index, center) + eps)
    elif scale != "none":
        if scale == "group" and own_std is not None:
            std = own_std
        else:
            std = group_std(advantages, whole, ddof) if scale == "residual" else group_std(rewards, scopes[scale], ddof)
        advantages = advantages / ((std.square() + eps).sqrt() if eps_inside_sqrt else std + eps)
    if center != "none":
        advantages = torch.where(is_constant(rewards, scopes[center]), torch.zeros_like(advantages), advantages)
    if clip is not None:
        advantages = advantages.clamp(-clip, clip)
    return advantages.to(torch.float32)


def _mean_of_positive(rewards: Tensor, index: Tensor, center: Scope) -> Tensor:
    """Mean of each sample's group, [B]. Raises ConfigError if it may be no divisor."""
    if center != "group":
        raise ConfigError(f"advantages.scale = mean divides by the mean of groups. Set center: group, not {center}.")
    if bool((rewards < 0).any()):
        raise ConfigError(
            f"advantages.scale = mean (MaxRL) needs rewards of at least 0, the least is {float(rewards.min()):g}. "
            "Set reward.weights so that the reward is 0 for a failure, or take another preset."
        )
    return group_mean(rewards, index)


def whitened_over_tokens(values_B: Tensor, num_tokens_B: Tensor, *, ddof: int, eps: float) -> Tensor:
    """(value - mean) / sqrt(var + eps), [B], mean and variance over the tokens that all hold their sample's value.

    values_B: float64. num_tokens_B: tokens of each sample; one without any has no say. Equal values give 0.
    """
    count_B = num_tokens_B.to(values_B.dtype)
    total = count_B.sum()
    if not bool(total > ddof) or bool((values_B == values_B[0]).all()):
        return torch.zeros_like(values_B)
    centred_B = values_B - (count_B * values_B).sum() / total
    variance = (count_B * centred_B.square()).sum() / (total - ddof)
    return centred_B / (variance + eps).sqrt()


_OVER_TOKENS: dict[object, dict[str, object]] = {
    "batch": {"scale": "batch", "eps_inside_sqrt": True, "leave_one_out": False},
    "group": {"scale": "residual", "eps_inside_sqrt": True, "leave_one_out": False},
    "none": {"center": "batch"},  # nothing that is not centred
}
"""What statistics = tokens goes with, by `center`."""


class Advantages(Protocol):
    """Turns the rewards of one whole batch into advantages. `advantages._target_` of a recipe names one."""

    needs_groups: ClassVar[bool]
    """True if a sample alone in its group gets no advantage."""
    makes_weights: ClassVar[bool]
    """True if they are weights of at least 0, for methods that fine-tune on their samples."""
    centres_groups: ClassVar[bool]
    """True if those of a group sum to 0, where `center` is group."""

    @property
    def counts_tokens(self) -> bool:
        """True if the number of trained tokens of each sample enters."""
        ...

    def __call__(
        self,
        rewards_B: Tensor,
        group_ids: Sequence[str],
        component_rewards: Mapping[str, Tensor] | None = None,
        *,
        progress: float = 0.0,
        num_tokens_B: Tensor | None = None,
    ) -> Tensor:
        """Advantages float32 [B], at `progress` in [0, 1] of the run. Called once per rollout.

        num_tokens_B: trained tokens of each sample, int64; given where `counts_tokens`.
        """
        ...

    def metrics(self, progress: float) -> dict[str, float]:
        """What to report of the rollout just normalised."""
        ...

    def state_dict(self) -> dict[str, Any]:  # Any: what JSON holds
        """What a checkpoint must hold of earlier rollouts, for JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: as above
        """Restore `state_dict`."""
        ...


@bounded("advantages")
@dataclass(frozen=True)
class AdvantageConfig:
    """How a recipe turns rewards into advantages. Fields left None come from the preset."""

    recipe_rules: ClassVar[str] = "unirl.algorithms.advantage_rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""
    needs_groups: ClassVar[bool] = True
    makes_weights: ClassVar[bool] = False
    centres_groups: ClassVar[bool] = True
    routes_media: ClassVar[bool] = False
    """True if each medium of a sample gets its own advantage."""

    preset: str = "flow_grpo"
    center: Scope | None = None
    scale: Scale | None = None
    ddof: Annotated[int, Bounds(ge=0, le=1)] | None = None
    eps: NonNegative | None = None
    eps_inside_sqrt: bool | None = None
    leave_one_out: bool | None = None
    statistics: Statistics | None = None
    clip: PositiveOrInf | None = None
    trim: Annotated[int, Bounds(ge=0)] = 0
    """So many lowest and highest samples of each group have no say in its mean and deviation."""
    multi_reward: MultiReward = "weighted_sum"
    """weighted_sum normalises the total. normalize_then_sum normalises each component and adds up w_k z_k (MixGRPO's
    advantage_aggr). gdpo centres and scales that sum over the whole batch once more, with the same ddof and eps, so
    that the number of components does not change the size of an update (Liu et al. 2026, arXiv 2601.05242; with the
    preset trl it is TRL's multi_objective_aggregation = normalize_then_sum)."""
    component_weights: Mapping[str, float | LinearWeight] | None = None
    """Weights of normalize_then_sum and gdpo, fixed or changing over the run; absent components count 1."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"advantages.preset = {self.preset!r} must be one of {', '.join(PRESETS)}")
        options = {"leave_one_out": False, **self.options()}
        check_eps(options["eps"], options["center"], options["scale"])  # ty: ignore[invalid-argument-type]
        check_trim(
            self.trim,
            str(options["center"]),
            str(options["scale"]),
            is_plain=not options["leave_one_out"] and not self.counts_tokens,
        )
        if self.counts_tokens and {**options, **_OVER_TOKENS[options["center"]]} != options:
            raise ConfigError(
                f"advantages.statistics = tokens is the whitening of REINFORCE++ and takes {_OVER_TOKENS}, by center; "
                f"got {options}. Set statistics: samples, or preset: reinforce_pp or reinforce_pp_baseline."
            )
        if self.component_weights is not None and self.multi_reward == "weighted_sum":
            raise ConfigError(
                "advantages.component_weights does nothing with multi_reward = weighted_sum. "
                "Set reward.weights, or multi_reward: normalize_then_sum or gdpo."
            )
        for name, weight in (self.component_weights or {}).items():
            if not isinstance(weight, (int, float, LinearWeight)):
                raise ConfigError(
                    f"advantages.component_weights.{name} = {weight!r} must be a number or a mapping with "
                    "_target_: unirl.algorithms.schedules.LinearWeight, start and end"
                )

    def options(self) -> dict[str, object]:
        """The preset with this recipe's changes."""
        names = ("center", "scale", "ddof", "eps", "eps_inside_sqrt", "leave_one_out", "statistics")
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**PRESETS[self.preset], **changes}

    @property
    def counts_tokens(self) -> bool:
        """True if mean and deviation over the batch count tokens."""
        return self.options().get("statistics") == "tokens"

    def weights(self, progress: float) -> dict[str, float]:
        """`component_weights` at `progress` in [0, 1] of the run."""
        given = self.component_weights or {}
        return {name: w(progress) if isinstance(w, LinearWeight) else w for name, w in given.items()}

    def metrics(self, progress: float) -> dict[str, float]:
        """The weights that a schedule changes, as they are at `progress`."""
        given = self.component_weights or {}
        return {f"advantage/weight/{name}": w(progress) for name, w in given.items() if isinstance(w, LinearWeight)}

    def __call__(
        self,
        rewards_B: Tensor,
        group_ids: Sequence[str],
        component_rewards: Mapping[str, Tensor] | None = None,
        *,
        progress: float = 0.0,
        num_tokens_B: Tensor | None = None,
    ) -> Tensor:
        """Advantages float32 [B] of one whole batch, at `progress` in [0, 1] of the run."""
        options = {**self.options(), "num_tokens_B": num_tokens_B, "trim": self.trim}
        if self.multi_reward == "weighted_sum":
            return normalized_advantages(rewards_B, group_ids, clip=self.clip, **options)  # ty: ignore[invalid-argument-type]
        if not component_rewards:
            raise ContractError(
                f"multi_reward = {self.multi_reward} needs component rewards, the scorers returned none"
            )
        weights = self.weights(progress)
        unknown = sorted(set(weights) - set(component_rewards))
        if unknown:
            raise ConfigError(
                f"advantages.component_weights names {unknown}; components are {sorted(component_rewards)}"
            )
        total = torch.zeros(len(group_ids), dtype=torch.float32)
        is_silent = torch.ones(len(group_ids), dtype=torch.bool)
        for name, component in component_rewards.items():
            own = normalized_advantages(component, group_ids, **options)  # ty: ignore[invalid-argument-type]
            is_silent &= own == 0
            total = total + weights.get(name, 1.0) * own
        if self.multi_reward == "gdpo":
            whole = {**options, "center": "batch", "scale": "batch", "leave_one_out": False, "trim": 0}
            # A sample that no component tells apart from its group teaches nothing, also where the mean is a rounding.
            again = normalized_advantages(total, group_ids, **whole)  # ty: ignore[invalid-argument-type]
            total = torch.where(is_silent, 0.0, again)
        return total.clamp(-self.clip, self.clip) if self.clip is not None else total

    def state_dict(self) -> dict[str, Any]:
        """Empty: every rollout is normalised by itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


def group_metrics(rewards_B: Tensor, group_ids: Sequence[str]) -> dict[str, float]:
    """How much the groups tell: fraction without spread, mean spread, number of groups."""
    index = group_index(group_ids)
    std = group_std(rewards_B.to(torch.float64), index, 0)
    first = torch.tensor([index.tolist().index(group) for group in range(int(index.max()) + 1)])
    per_group = std[first]
    return {
        "group/count": float(per_group.numel()),
        "group/zero_std_ratio": float((per_group == 0).double().mean()),
        "group/std_mean": float(per_group.mean()),
    }
