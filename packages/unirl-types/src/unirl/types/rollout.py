"""The request that goes into an engine and the response that comes out.

A response is a set of named tracks; a track is one generation stage of every sample: its conditions, its segment
(tokens or latents), the decoded media, rewards, advantages and lineage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from unirl.types.batch import Batch, Indices, peak, per_sample, rows_by, shared
from unirl.types.conditions import Condition
from unirl.types.errors import ContractError
from unirl.types.media import Images, Primitive, SizedImages, Texts
from unirl.types.sampling import BaseSamplingParams, DiffusionSamplingParams, StagedSamplingParams
from unirl.types.segments import LatentSegment, Segment, SizedLatents, TextSegment

Scope = Literal["group", "batch", "global"]
Credit = Literal["mean", "max", "sum", "best_of"]
"""How the rewards of children become their parent's, see `RolloutResp.propagate_rewards`."""


def _check_unique(ids: list[str], where: str) -> None:
    if len(set(ids)) != len(ids):
        repeated = sorted({i for i in ids if ids.count(i) > 1})
        raise ContractError(f"{where} repeat {repeated[:3]}; every sample needs its own id")


@dataclass(frozen=True)
class DiffusionPlan:
    """What the driver pins on every request of one geometry."""

    sigmas: Tensor
    """[T+1] float32."""
    latent_shape: tuple[int, ...]
    """Shape of ONE latent."""
    kernel: str
    """Name of the kernel of the stochastic steps."""


@dataclass(kw_only=True, eq=False)
class RolloutReq(Batch):
    """What an engine is asked to generate. One row per sample: the driver has already repeated each prompt."""

    sample_ids: list[str] = per_sample(default_factory=list)
    group_ids: list[str] = per_sample(default_factory=list)
    """Samples of one prompt share it."""
    primitives: dict[str, Primitive] = per_sample(default_factory=dict)
    """Inputs by slot: "text", "image", ..."""
    request_conditions: dict[str, Condition] = per_sample(default_factory=dict)
    """Conditions computed beforehand; "initial_latents" is used verbatim as the start."""
    metadata: list[dict[str, Any] | None] = per_sample(default_factory=list)  # Any: rows of a user's data file
    sampling_params: BaseSamplingParams | None = shared(default=None)
    sigmas: Tensor | None = shared(default=None)
    """[T+1] float32. The single owner of the noise levels: engines use them verbatim and echo them."""
    plans: dict[str, DiffusionPlan] = shared(default_factory=dict)
    """Where several stages sample: what is pinned for each that denoises, by track, in place of `sigmas` and
    `init_noise_latent_shape`."""
    init_noise_group_ids: list[str] = per_sample(default_factory=list)
    """Ids of the initial noise; equal ids start equal."""
    init_noise_latent_shape: list[int] | None = shared(default=None)
    """Shape of ONE latent."""
    own_steps: list[int] = per_sample(default_factory=list)
    """The one stochastic step of each sample, where `sampling_params.one_step` is set."""
    rollout_id: int = shared(default=0)
    """Which rollout of the run this is; part of every noise id."""
    number: int | None = shared(default=None)
    """The request among several that a served pool has at once: when its calls begin is decided for each
    (`unirl.distributed.pools.gates`). None: they begin as soon as a member is free."""
    begun: RolloutTrack | None = per_sample(default=None)
    """What an earlier call made of the samples before it was ended early; those that it finished stay as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_unique(self.sample_ids, "RolloutReq.sample_ids")

    @property
    def rows(self) -> list[dict[str, Any]]:  # Any: rows of a user's data file
        """`metadata` of every sample, an empty mapping where there is none."""
        return [row or {} for row in self.metadata] or [{} for _ in range(self.batch_size)]

    @property
    def texts(self) -> list[str]:
        """The slot "text" of every sample, empty where there is none."""
        texts = self.primitives.get("text")
        return list(texts.texts) if isinstance(texts, Texts) else [""] * self.batch_size

    def continuing(self, begun: RolloutResp | None) -> Self:
        """The same samples, of which an earlier call has made a part; None: of which nothing is made."""
        return self if begun is None else self.replace(begun=begun.root_track())

    def is_answered_by(self, resp: RolloutResp) -> bool:
        """True if a response has every sample of every stage that the request names, which `abort` ends early or keeps
        from beginning. resp: also the metadata alone, and with tracks of other stages, finished or not."""
        params = self.sampling_params
        if isinstance(params, StagedSamplingParams):
            return all(resp.has_all_of(track) for track in params.stages)
        return not resp.num_unfinished

    def make_root_track(
        self, *, conditions: Mapping[str, Condition], segment: Segment | None, decoded: Primitive | None
    ) -> RolloutTrack:
        """The first track of a response: one row a requested sample, grouped as the request says."""
        if not self.sample_ids:
            raise ContractError("a request without sample_ids makes no track")
        return RolloutTrack(
            sample_ids=list(self.sample_ids),
            parent_ids=list(self.group_ids) or None,
            primitives=dict(self.primitives),
            metadata=list(self.metadata),
            conditions=dict(conditions),
            segment=segment,
            decoded=decoded,
        )


@dataclass(kw_only=True, eq=False)
class RolloutTrack(Batch):
    """One generation stage of every sample."""

    sample_ids: list[str] = per_sample(default_factory=list)
    parent_ids: list[str] | None = per_sample(default=None)
    """Group id (root track) or id of the sample of the parent track this one grew from."""
    parent_track: str | None = shared(default=None)
    primitives: dict[str, Primitive] = per_sample(default_factory=dict)
    """What was asked for, as in the request (root tracks): a track alone can be scored."""
    metadata: list[dict[str, Any] | None] = per_sample(default_factory=list)  # Any: rows of a user's data file
    conditions: dict[str, Condition] = per_sample(default_factory=dict)
    segment: Segment | None = per_sample(default=None)
    decoded: Primitive | None = per_sample(default=None)
    rewards: Tensor | None = per_sample(default=None)
    """[B] float32."""
    component_rewards: dict[str, Tensor] = per_sample(default_factory=dict)
    """[B] float32 each, raw (unweighted)."""
    reward_errors: list[str | None] = per_sample(default_factory=list)
    """Why a sample has no reward (its reward is NaN); None for one that has. Empty before the track is scored."""
    advantages: Tensor | None = per_sample(default=None)
    """[B] float32."""
    media_advantages: dict[str, Tensor] = per_sample(default_factory=dict)
    """[B] float32 each: advantages of one medium of a sample, by its name; empty where all have `advantages`."""
    policy_versions: Tensor | None = per_sample(default=None)
    """[B] int64: which version of the policy made the sample, or began it."""
    last_versions: Tensor | None = per_sample(default=None)
    """[B] int64: which version ended the sample. Absent: the one that began it."""
    is_unfinished: Tensor | None = per_sample(default=None)
    """[B] bool: the engine was told to end the sample early, and can continue it (`RolloutReq.begun`). Absent: none."""
    counts: dict[str, Tensor] = per_sample(default_factory=dict)
    """[B] float32 each: what the engine counted of each sample, for the metrics. What is absent was never met: 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parent_ids is not None and len(self.parent_ids) != len(self.sample_ids):
            raise ContractError(
                f"RolloutTrack has {len(self.parent_ids)} parent_ids for {len(self.sample_ids)} sample_ids"
            )
        if self.parent_track is not None and self.parent_ids is None:
            raise ContractError(f"a track that grows from {self.parent_track!r} needs parent_ids")

    @property
    def is_whole(self) -> bool:
        """False if samples were ended early; also of rows that are finished but were cut short with others, and may
        have no media."""
        return self.is_unfinished is None

    @classmethod
    def _align(cls, parts: list[Self]) -> list[Self]:
        """What some shards lack where others have it: NaN for the components of one in which nothing could be scored, 0
        for what it never counted, and the versions of tokens or steps where one version made it. No media where some
        denoising is unfinished: they are decoded when all is finished."""
        scored = [part for part in parts if part.rewards is not None]
        keys = list(dict.fromkeys(key for part in scored for key in part.component_rewards))
        parts = [part._with_components(keys) if part.has_no_reward else part for part in parts]
        counted = sorted({key for part in parts for key in part.counts})
        parts = [part if part.counts.keys() == set(counted) else part._with_counts(counted) for part in parts]
        if any(part.is_unfinished is not None for part in parts):
            parts = [part._with_endings() for part in parts]
            if any(isinstance(part.segment, LatentSegment) for part in parts):
                parts = [part.replace(decoded=None) for part in parts]
        if any(part.last_versions is not None for part in parts):
            parts = [part._with_token_versions() for part in parts]
        return parts

    def _with_counts(self, names: list[str]) -> Self:
        nothing = torch.zeros(self.batch_size)
        return self.replace(counts={name: self.counts.get(name, nothing) for name in names})

    def _with_components(self, keys: list[str]) -> Self:
        if self.rewards is None:
            return self
        nothing = torch.full_like(self.rewards, torch.nan)
        return self.replace(component_rewards={key: self.component_rewards.get(key, nothing) for key in keys})

    def _with_endings(self) -> Self:
        if self.is_unfinished is not None:
            return self
        return self.replace(is_unfinished=torch.zeros(self.batch_size, dtype=torch.bool))

    def _with_token_versions(self) -> Self:
        segment, versions_B = self.segment, self.policy_versions
        if self.last_versions is not None or versions_B is None:
            return self
        if isinstance(segment, TextSegment):
            segment = segment.replace(versions=segment.versions_by_token(versions_B))
        elif isinstance(segment, LatentSegment):
            segment = segment.replace(versions=segment.versions_by_step(versions_B).to(segment.latents.device))
        return self.replace(last_versions=versions_B, segment=segment)

    @property
    def scored_rewards(self) -> Tensor:
        """[B] float32 rewards, NaN where `reward_errors` says why. Raises ContractError if the track has none."""
        if self.rewards is None:
            raise ContractError("this track has no rewards; score it first")
        return self.rewards

    @property
    def known_advantages(self) -> Tensor:
        """[B] float32 advantages. Raises ContractError if the track has none."""
        if self.advantages is None:
            raise ContractError("this track has no advantages; attach them first")
        return self.advantages

    @property
    def has_no_reward(self) -> bool:
        """True if the track was scored and no sample of it could be."""
        return bool(self.reward_errors) and None not in self.reward_errors

    @property
    def failed_groups(self) -> set[str]:
        """Groups with a sample that could not be scored."""
        errors = self.reward_errors or [None] * self.batch_size
        return {group for group, error in zip(self.group_ids, errors, strict=True) if error is not None}

    @property
    def group_ids(self) -> list[str]:
        """Group of each sample: its parent, or itself where it has none."""
        return self.parent_ids if self.parent_ids is not None else self.sample_ids

    def metadata_only(self) -> RolloutTrack:
        """Ids, rewards, advantages, versions and counts, without inputs, conditions, segment and media."""
        return dataclasses.replace(self, primitives={}, metadata=[], conditions={}, segment=None, decoded=None)

    def split(self) -> list[RolloutTrack]:
        """One track a group, in order of first appearance."""
        return [self.select(rows) for rows in rows_by(self.group_ids).values()]

    def sized(self, params: DiffusionSamplingParams) -> RolloutTrack:
        """A copy that joins tracks of images of other sizes. params: what was asked for, see `SizedLatents`."""
        if not isinstance(self.segment, LatentSegment):
            raise ContractError(f"a track of {type(self.segment).__name__} has no size")
        media = self.decoded.sized() if isinstance(self.decoded, Images) else self.decoded
        return dataclasses.replace(self, segment=self.segment.sized().replace(params=params), decoded=media)

    def by_size(self) -> list[tuple[list[int], RolloutTrack]]:
        """Rows and their track for each size of image, in order of first appearance; the whole where it has one
        geometry anyway."""
        if not isinstance(self.segment, SizedLatents):
            return [(list(range(self.batch_size)), self)]
        parts = []
        for rows in self.segment.rows_by_size():
            part = self.select(rows)
            segment, media = part.segment, part.decoded
            parts.append(
                (
                    rows,
                    dataclasses.replace(
                        part,
                        segment=segment.of_one_size() if isinstance(segment, SizedLatents) else segment,
                        decoded=media.of_one_size() if isinstance(media, SizedImages) else media,
                    ),
                )
            )
        return parts

    def fork(
        self,
        name: str,
        child_name: str,
        branch: int,
        *,
        conditions: Mapping[str, Condition] | None = None,
        segment: Segment | None = None,
        decoded: Primitive | None = None,
    ) -> RolloutTrack:
        """A child track with `branch` samples of each of this track's samples, ids `{parent}/{letter}{j}`."""
        if branch < 1:
            raise ContractError(f"branch = {branch} must be at least 1")
        if not child_name:
            raise ContractError("a child track needs a name; its first letter becomes part of the sample ids")
        children = [f"{parent}/{child_name[0]}{j}" for parent in self.sample_ids for j in range(branch)]
        parents = [parent for parent in self.sample_ids for _ in range(branch)]
        return RolloutTrack(
            sample_ids=children,
            parent_ids=parents,
            parent_track=name,
            conditions=dict(conditions or {}),
            segment=segment,
            decoded=decoded,
        )


@dataclass(kw_only=True, eq=False)
class RolloutResp(Batch):
    """Every track of a rollout, with its lineage checked."""

    tracks: dict[str, RolloutTrack] = per_sample(default_factory=dict)
    reward_compute_s: float = peak(default=0.0)

    def __post_init__(self) -> None:
        for name, track in self.tracks.items():
            _check_unique(track.sample_ids, f"sample_ids of track {name}")
            if track.parent_track is None:
                continue
            if track.parent_track not in self.tracks:
                raise ContractError(
                    f"track {name} grows from {track.parent_track}, which is not in {list(self.tracks)}"
                )
            known = set(self.tracks[track.parent_track].sample_ids)
            orphans = sorted(set(track.group_ids) - known)
            if orphans:
                raise ContractError(f"track {name} has parents {orphans[:3]} that {track.parent_track} lacks")
        for name in self.tracks:
            self._check_rooted(name)

    @classmethod
    def _align(cls, parts: list[Self]) -> list[Self]:
        """Tracks without samples where a shard was ended early before their stage began."""
        known = {name: track for part in reversed(parts) for name, track in reversed(part.tracks.items())}
        grown = {name: track for name, track in reversed(known.items()) if track.parent_track is not None}
        return [part if part.tracks.keys() >= grown.keys() else part._with_tracks(grown) for part in parts]

    def _with_tracks(self, others: Mapping[str, RolloutTrack]) -> Self:
        more = {name: track.select([]) for name, track in others.items() if name not in self.tracks}
        return dataclasses.replace(self, tracks={**self.tracks, **more})

    def _check_rooted(self, name: str) -> None:
        path = [name]
        while (parent := self.tracks[path[-1]].parent_track) is not None:
            if parent in path:
                raise ContractError(f"tracks grow from each other: {' <- '.join([*path, parent])}")
            path.append(parent)

    @property
    def batch_size(self) -> int:
        """Samples of the root track, which is what select, slice and concat count; 0 without tracks."""
        return self.root_track().batch_size if self.tracks else 0

    def track(self, name: str) -> RolloutTrack:
        """The track of this name. Raises ContractError naming those there are."""
        if name not in self.tracks:
            raise ContractError(f"there is no track {name!r}; this response has {list(self.tracks)}")
        return self.tracks[name]

    def has_all_of(self, name: str) -> bool:
        """True if there is a track of this name, finished, that grew from every sample of its parent."""
        track = self.tracks.get(name)
        if track is None or not track.is_whole:
            return False
        return track.parent_track is None or not set(self.tracks[track.parent_track].sample_ids) - set(track.group_ids)

    @property
    def num_unfinished(self) -> int:
        """Samples that were ended early and can be continued."""
        return sum(int(track.is_unfinished.sum()) for track in self.tracks.values() if track.is_unfinished is not None)

    def root_name(self) -> str:
        """Name of the one track without a parent. Raises ContractError unless there is exactly one."""
        roots = [name for name, track in self.tracks.items() if track.parent_track is None]
        if len(roots) != 1:
            raise ContractError(f"expected one root track, found {roots}")
        return roots[0]

    def root_track(self) -> RolloutTrack:
        """The one track without a parent."""
        return self.tracks[self.root_name()]

    def select(self, indices: Indices) -> Self:
        """The root samples at `indices` with everything that grew from them, children in the order of their parents.

        Raises ContractError if a root sample is asked for twice: its id would no longer be unique.
        """
        return self._with_what_grew({self.root_name(): self.root_track().select(indices)})

    def select_of(self, name: str, rows: Sequence[int]) -> Self:
        """The samples of one track at `rows` alone, with everything that grew from them; the tracks above it and what
        else grew from those stay whole, children in the order of their parents."""
        whole = {up: self.tracks[up] for up in self.lineage(name) if up != name}
        return self._with_what_grew({**whole, name: self.track(name).select(rows)})

    def _with_what_grew(self, chosen: dict[str, RolloutTrack]) -> Self:
        """The chosen tracks, and of the others what grew from their samples."""
        waiting = [name for name in self.tracks if name not in chosen]
        while waiting:
            for name in list(waiting):
                track = self.tracks[name]
                if track.parent_track in chosen:
                    order = {sample: row for row, sample in enumerate(chosen[track.parent_track].sample_ids)}
                    rows = [row for row, parent in enumerate(track.group_ids) if parent in order]
                    rows.sort(key=lambda row, track=track, order=order: order[track.group_ids[row]])
                    chosen[name] = track.select(rows)
                    waiting.remove(name)
        return dataclasses.replace(self, tracks={name: chosen[name] for name in self.tracks})

    def split(self) -> list[Self]:
        """One response a root group."""
        return [self.select(rows) for rows in rows_by(self.root_track().group_ids).values()]

    def with_inputs(self, name: str) -> RolloutTrack:
        """The track with what was asked for: inputs, metadata and groups of the request. A child has those of the root
        samples that its samples grew from."""
        track = self.track(name)
        if track.parent_track is None:
            return track
        root, rows = self.root_rows(name)
        asked = dataclasses.replace(root, conditions={}, segment=None, decoded=None).select(rows)
        return dataclasses.replace(
            track,
            primitives=asked.primitives,
            metadata=asked.metadata,
            parent_ids=asked.group_ids,
            parent_track=None,
        )

    def lineage(self, name: str) -> dict[str, list[int]]:
        """The track and those that it grew from, up to the root -> the row in each that a sample of the track grew
        from."""
        at = self.track(name)
        found = {name: list(range(at.batch_size))}
        while (up := at.parent_track) is not None:
            places = {sample: row for row, sample in enumerate(self.tracks[up].sample_ids)}
            found[up] = [places[at.group_ids[row]] for row in next(reversed(found.values()))]
            at = self.tracks[up]
        return found

    def root_rows(self, name: str) -> tuple[RolloutTrack, list[int]]:
        """The root track that a track grew from, and the row in it of each of the track's samples."""
        root, rows = list(self.lineage(name).items())[-1]
        return self.tracks[root], rows

    def propagate_rewards(self, child: str, parent: str, how: Credit) -> Self:
        """The response with rewards [B] and component rewards of `parent` made from those of its children.

        how: "mean", "max" and "sum" of the children's rewards, and likewise of every component; "best_of" takes reward
        and components of the child with the highest reward, the first of equals. A parent with a child that could not
        be scored has none either: NaN and that child's error. float32, accumulated in float64.
        Raises ContractError if `parent` is not the track that `child` grows from, has rewards already or has a
        sample without children, and where `child` has no rewards.
        """
        own, above = self.track(child), self.track(parent)
        if own.parent_track != parent:
            raise ContractError(f"track {child} grows from {own.parent_track}, not from {parent}")
        if own.rewards is None:
            raise ContractError(f"track {child} has no rewards to credit {parent} with; score it first")
        if above.rewards is not None:
            raise ContractError(f"track {parent} already has rewards; credit it once, or score it alone")
        children: dict[str, list[int]] = {sample: [] for sample in above.sample_ids}
        for row, sample in enumerate(own.group_ids):
            children[sample].append(row)
        childless = [sample for sample, rows in children.items() if not rows]
        if childless:
            raise ContractError(f"samples {childless[:3]} of track {parent} have no children in {child}")
        groups = [torch.tensor(rows) for rows in children.values()]
        rewards_B = own.rewards
        chosen = [rows[_first_best(rewards_B[rows])] for rows in groups]
        errors = own.reward_errors or [None] * own.batch_size
        return self.with_values(
            parent,
            rewards=_credited(rewards_B, groups, chosen, how),
            component_rewards={
                name: _credited(values, groups, chosen, how) for name, values in own.component_rewards.items()
            },
            reward_errors=[
                next((f"{own.sample_ids[row]}: {errors[row]}" for row in rows if errors[row] is not None), None)
                for rows in children.values()
            ],
        )

    def with_values(self, track: str, **fields: Any) -> Self:  # Any: fields of RolloutTrack, one item per sample
        """The response with other values in one of its tracks, such as `advantages` [B] of the track's samples.

        Raises ContractError if there is no such track, or the values have another size.
        """
        return dataclasses.replace(self, tracks={**self.tracks, track: self.track(track).replace(**fields)})

    def metadata_only(self) -> Self:
        """The response without tensors that are large."""
        return dataclasses.replace(self, tracks={name: track.metadata_only() for name, track in self.tracks.items()})


def _first_best(rewards: Tensor) -> int:
    """Place of the highest reward, the first of equals; of a NaN where there is one."""
    missing = rewards.isnan().nonzero().flatten()
    return int(missing[0]) if missing.numel() else int((rewards == rewards.max()).nonzero()[0])


def _credited(values_C: Tensor, groups: list[Tensor], chosen: list[Tensor], how: Credit) -> Tensor:
    """[B] float32 from the children's [C]; NaN where one of the children has it."""
    if how == "best_of":
        return torch.stack([values_C[row] for row in chosen]).float()
    per_parent = [values_C[rows.to(values_C.device)].double() for rows in groups]
    if how == "mean":
        return torch.stack([values.mean() for values in per_parent]).float()
    if how == "sum":
        return torch.stack([values.sum() for values in per_parent]).float()
    if how == "max":
        return torch.stack([values.max() for values in per_parent]).float()
    raise ContractError(f"how = {how!r} must be one of {', '.join(map(repr, get_args(Credit)))}")
