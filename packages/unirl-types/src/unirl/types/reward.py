"""What a scorer is asked and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from unirl.types.actions import ActionSegment
from unirl.types.batch import Batch, peak, per_sample, shared
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Audios, ImageLists, Images, Primitive, Texts, Videos
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment

NumberT = TypeVar("NumberT", int, float)

_SLOTS: dict[type, str] = {Images: "image", Videos: "video", Texts: "text", Audios: "audio"}


@dataclass(kw_only=True, eq=False)
class RewardRequest(Batch):
    """Inputs and generated media of a batch of samples."""

    sample_ids: list[str] = per_sample(default_factory=list)
    group_ids: list[str] = per_sample(default_factory=list)
    primitives: dict[str, Primitive] = per_sample(default_factory=dict)
    """What the model was given: "text", "image", "audio", ..."""
    generated: dict[str, Primitive] = per_sample(default_factory=dict)
    """What it made: "image", "video", "audio" or "text"; nothing where the engine decodes nothing."""
    latents: Tensor | None = per_sample(default=None)
    """[B, ...] clean latents of a denoised sample."""
    metadata: list[dict[str, Any] | None] = per_sample(default_factory=list)  # Any: rows of a user's data file

    @property
    def prompts(self) -> list[str]:
        """The text inputs. Raises ContractError if the request has none."""
        texts = self.primitives.get("text")
        if not isinstance(texts, Texts):
            raise ContractError(f"this request has no text input; it has {sorted(self.primitives)}")
        return texts.texts

    def in_floats(self) -> Self:
        """The same with generated images and videos in [0, 1]."""
        media = self.generated.items()
        return self.replace(
            generated={slot: each.in_floats() if isinstance(each, (Images, Videos)) else each for slot, each in media}
        )

    @property
    def sources(self) -> list[list[Tensor]]:
        """The images [C, H, W] that each sample was given, as many as it brings. Raises ConfigError if the request
        has none."""
        images = self.primitives.get("image")
        if isinstance(images, Images):
            return [[pixels] for pixels in images.in_floats().pixels]
        if isinstance(images, ImageLists):
            return images.images
        raise ConfigError(
            f"scorers ask for the images that samples were given; the request has the inputs "
            f"{sorted(self.primitives)}. Give the data rows per image."
        )

    @property
    def source_sounds(self) -> Audios:
        """The sound that each sample was given, empty for one without. Raises ConfigError if the request has none."""
        sounds = self.primitives.get("audio")
        if isinstance(sounds, Audios):
            return sounds
        raise ConfigError(
            f"scorers ask for the sounds that samples were given; the request has the inputs "
            f"{sorted(self.primitives)}. Give the data rows `audio`."
        )

    @property
    def pixels(self) -> Tensor:
        """Generated images [B, C, H, W] in [0, 1]. Raises ContractError if the request has none."""
        images = self.generated.get("image")
        if not isinstance(images, Images):
            raise ContractError(f"this request has no generated image; it has {sorted(self.generated)}")
        return images.pixels

    @property
    def texts(self) -> list[str]:
        """Generated texts. Raises ContractError if the request has none."""
        texts = self.generated.get("text")
        if not isinstance(texts, Texts):
            raise ContractError(f"this request has no generated text; it has {sorted(self.generated)}")
        return texts.texts


@dataclass(kw_only=True, eq=False)
class RewardResponse(Batch):
    """Scores of a batch. A failed sample has success False and an error text; its reward is NaN, never 0."""

    sample_ids: list[str] = per_sample(default_factory=list)
    rewards: Tensor = per_sample()
    """[B] float32."""
    component_rewards: dict[str, Tensor] = per_sample(default_factory=dict)
    """[B] float32 each, raw (unweighted)."""
    successes: list[bool] = per_sample(default_factory=list)
    errors: list[str | None] = per_sample(default_factory=list)
    compute_s: float = peak(default=0.0)
    """Seconds of scoring; of shards that ran side by side, the longest."""
    counters: dict[str, int] | None = shared(default=None)
    """Counts of the whole batch (failures, retries). They add up when shards join; select and slice keep them."""
    gauges: dict[str, float] | None = shared(default=None)
    """Measurements of the whole batch (waiting, utilisation). The largest stays when shards join."""

    @classmethod
    def _align(cls, parts: list[Self]) -> list[Self]:
        known = [part for part in parts if any(part.successes) or not part.successes]
        keys = {key for part in known or parts for key in part.component_rewards}
        totals = _merged([part.counters for part in parts], sum)
        peaks = _merged([part.gauges for part in parts], max)
        return [part.replace(counters=totals, gauges=peaks, component_rewards=part._with(keys)) for part in parts]

    def _with(self, keys: set[str]) -> dict[str, Tensor]:
        """The component rewards; NaN for all of `keys` where nothing could be scored and components are unknown."""
        if any(self.successes) or not self.successes or keys == set(self.component_rewards):
            return self.component_rewards
        return {key: self.component_rewards.get(key, torch.full_like(self.rewards, torch.nan)) for key in sorted(keys)}


def _merged(
    parts: list[dict[str, NumberT] | None], merge: Callable[[list[NumberT]], NumberT]
) -> dict[str, NumberT] | None:
    """Numbers of several shards by name; None where no shard has any."""
    present = [part for part in parts if part is not None]
    names = sorted({name for part in present for name in part})
    return {name: merge([part[name] for part in present if name in part]) for name in names} if present else None


def request_for_track(track: RolloutTrack, media: Primitive | None) -> RewardRequest:
    """What scorers are asked about `media` [B] as the result of a root track: with its inputs, groups and metadata.

    media may be the track's own decoded media or others made of its latents, with or without gradients; None where
    there are none.
    Raises ContractError if the track does not know its inputs, or for media that have no scorers.
    """
    if not track.primitives:
        raise ContractError("the track does not say what was asked for; make it with RolloutReq.make_root_track")
    return RewardRequest(
        sample_ids=list(track.sample_ids),
        group_ids=list(track.group_ids),
        primitives=dict(track.primitives),
        generated={} if media is None else {media_slot(media): media},
        metadata=list(track.metadata),
    )


def reward_request(resp: RolloutResp, name: str) -> RewardRequest:
    """What scorers are asked about a track: its decoded media, where it has any, and its clean latents, where it was
    denoised, with the inputs, groups and metadata of the request, those of a child through its lineage. What an
    environment said of an episode is in its metadata.

    Raises ContractError if there is no such track, or it has neither media nor latents nor episodes.
    """
    return _request_of(resp.with_inputs(name), name)


def reward_requests(resp: RolloutResp, name: str) -> list[tuple[list[int], RewardRequest]]:
    """As `reward_request`, one for each size of image with the rows that it asks about; one alone for media whose size
    all share."""
    return [(rows, _request_of(track, name)) for rows, track in resp.with_inputs(name).by_size()]


def _request_of(track: RolloutTrack, name: str) -> RewardRequest:
    latents = track.segment.clean_latents if isinstance(track.segment, LatentSegment) else None
    if track.decoded is None and latents is None and not isinstance(track.segment, ActionSegment):
        raise ContractError(f"track {name} has neither decoded media nor latents to score")
    return request_for_track(track, track.decoded).replace(latents=latents)


def media_slot(media: Primitive) -> str:
    """The slot of `RewardRequest.generated` for media. Raises ContractError for a kind that cannot be scored."""
    if type(media) not in _SLOTS:
        raise ContractError(f"decoded {type(media).__name__} cannot be scored; scorers take {sorted(_SLOTS.values())}")
    return _SLOTS[type(media)]
