"""Takes records of samples in the workers that hold a response: which samples, and the facts about each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import torch

from unirl.distributed.held import Held
from unirl.tracking.video import STRIP_FRAMES
from unirl.types.actions import ActionSegment
from unirl.types.batch import rows_by
from unirl.types.media import Audios, ImageLists, Images, Primitive, SizedImages, Texts, Videos, pixel_bytes
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.samples import Image, Medium, SampleRecord, Sound, Text, Unshown, Video
from unirl.types.segments import SegmentStatus, TextSegment

Taken = dict[str, list[SampleRecord]]
"""Root sample -> its record and those of its descendants, track by track."""


def take(resp: Held, roots: Sequence[str], *, whole: Collection[str] = ()) -> Taken:
    """Records of some root samples of a held response, in their order.

    whole: samples whose videos are taken with every frame; others are cut to STRIP_FRAMES frames.
    """
    parts = resp.map(take_samples, frozenset(roots), frozenset(whole))
    groups = {name: _groups(track) for name, track in resp.meta.tracks.items()}
    found = {
        root: [_with_group(record, *groups[record.track][record.group_id]) for record in records]
        for part in parts
        for root, records in part.items()
    }
    return {root: found[root] for root in roots}


def take_samples(resp: RolloutResp, roots: Collection[str], whole: Collection[str]) -> Taken:
    """`take` for one shard (runs in the workers that hold the response)."""
    taken: Taken = {sample: [] for sample in resp.root_track().sample_ids if sample in roots}
    for name, track in resp.tracks.items():
        root, root_rows = resp.root_rows(name)
        of_sample = [root.sample_ids[row] for row in root_rows]
        rows = [row for row, sample in enumerate(of_sample) if sample in taken]
        asked = resp.with_inputs(name)
        prompts = asked.primitives.get("text")
        media = _media(track, rows)
        given = _given(asked.primitives, rows)
        for place, row in enumerate(rows):
            medium = media[place]
            if isinstance(medium, Video) and of_sample[row] not in whole:
                medium = _excerpt(medium)
            record = SampleRecord(
                sample_id=track.sample_ids[row],
                track=name,
                group_id=track.group_ids[row],
                prompt_id=asked.group_ids[row],
                parent_id=None if track.parent_track is None else track.group_ids[row],
                parent_track=track.parent_track,
                prompt=prompts.texts[row] if isinstance(prompts, Texts) else "",
                given=given[place],
                drawn_from=_drawn_from(track, row),
                media=medium,
                scores=scores_of(track, row),
                error=track.reward_errors[row] if track.reward_errors else None,
                advantage=None if track.advantages is None else float(track.advantages[row]),
                policy_version=None if track.policy_versions is None else int(track.policy_versions[row]),
                end=_end(track, row),
                counts={count: float(values[row]) for count, values in track.counts.items()},
                metadata=(asked.metadata[row] or {}) if asked.metadata else {},
            )
            taken[of_sample[row]].append(record)
    return taken


def scores_of(track: RolloutTrack, row: int) -> dict[str, float]:
    """Reward and components of one sample; empty if it has no score."""
    if track.rewards is None or (track.reward_errors and track.reward_errors[row] is not None):
        return {}
    columns = {"reward": track.rewards, **track.component_rewards}
    return {name: float(values[row]) for name, values in columns.items()}


def whole_groups(resp: RolloutResp, most: int) -> list[str]:
    """Root samples of the first groups with at most `most` samples in each track. If already the first group has more,
    its first root samples up to that number."""
    root, sizes = resp.root_track(), _sizes(resp)
    chosen: list[int] = []
    for rows in rows_by(root.group_ids).values():
        if sum(sizes[row] for row in (*chosen, *rows)) > most:
            break
        chosen += rows
    return [root.sample_ids[row] for row in chosen] or first_roots(resp, most)


def first_roots(resp: RolloutResp, num: int) -> list[str]:
    """The shortest prefix of root samples with at least `num` samples in their largest track."""
    totals = itertools.accumulate(_sizes(resp), initial=0)
    return [sample for sample, before in zip(resp.root_track().sample_ids, totals, strict=False) if before < num]


def _sizes(resp: RolloutResp) -> list[int]:
    """Size of each root sample in its largest track."""
    sizes = [1] * resp.batch_size
    for name in resp.tracks:
        for row, own in rows_by(resp.root_rows(name)[1]).items():
            sizes[row] = max(sizes[row], len(own))
    return sizes


def _groups(track: RolloutTrack) -> dict[str, tuple[int, float | None]]:
    """Size of each group and standard deviation of its rewards; None if a sample has no reward."""
    rewards = None if track.rewards is None else track.rewards.double()
    found: dict[str, tuple[int, float | None]] = {}
    for group, rows in rows_by(track.group_ids).items():
        std = torch.nan if rewards is None else float(rewards[rows].std(unbiased=False))
        found[group] = len(rows), None if math.isnan(std) else std
    return found


def _with_group(record: SampleRecord, size: int, std: float | None) -> SampleRecord:
    return dataclasses.replace(record, group_size=size, group_reward_std=std)


def _media(track: RolloutTrack, rows: Sequence[int]) -> list[Medium | None]:
    """The generated media, copied, since a view would keep the whole batch."""
    decoded = track.decoded
    match decoded:
        case None:
            return [None] * len(rows)
        case Images():
            return [Image(pixel_bytes(decoded.pixels[row]).cpu().clone()) for row in rows]
        case SizedImages():
            return [Image(pixel_bytes(decoded.images[row]).cpu().clone()) for row in rows]
        case Videos():
            chosen = decoded.select(rows)
            sounds = [None] * len(rows) if chosen.audio is None else _sounds(chosen.audio)
            frames = [pixel_bytes(video).cpu().clone() for video in chosen.unpack("frames")]
            return [Video(video, decoded.fps, len(video), sound) for video, sound in zip(frames, sounds, strict=True)]
        case Audios():
            return list(_sounds(decoded.select(rows)))
        case Texts():
            lengths = track.segment.lengths.tolist() if isinstance(track.segment, TextSegment) else None
            return [Text(decoded.texts[row], None if lengths is None else lengths[row]) for row in rows]
        case other:
            return [Unshown(type(other).__name__)] * len(rows)


def _sounds(audio: Audios) -> list[Sound]:
    return [Sound(waveform.float().cpu().clone(), audio.sample_rate) for waveform in audio.unpack("waveform")]


def _excerpt(video: Video) -> Video:
    places = torch.linspace(0, len(video.frames) - 1, min(STRIP_FRAMES, len(video.frames))).round().long()
    return dataclasses.replace(video, frames=video.frames[places])


def _given(primitives: Mapping[str, Primitive], rows: Sequence[int]) -> list[tuple[Medium, ...]]:
    """The images and sounds of each prompt."""
    found: list[list[Medium]] = [[] for _ in rows]
    for slot, value in primitives.items():
        for place, row in enumerate(rows):
            if slot == "image" and isinstance(value, ImageLists):
                sources = (None,) * len(value.images[row]) if value.sources is None else value.sources[row]
                pairs = zip(value.images[row], sources, strict=True)
                found[place] += [Image(pixel_bytes(image).cpu().clone(), source) for image, source in pairs]
            elif isinstance(value, Audios) and int(value.lengths[row]):
                found[place] += _sounds(value.select([row]))
    return [tuple(each) for each in found]


def _drawn_from(track: RolloutTrack, row: int) -> str | None:
    texts = track.primitives.get("thought", track.primitives.get("text"))
    return texts.texts[row] if track.parent_track is not None and isinstance(texts, Texts) else None


def _end(track: RolloutTrack, row: int) -> str | None:
    if not isinstance(track.segment, (TextSegment, ActionSegment)):
        return None
    status = track.segment.status
    return SegmentStatus(SegmentStatus.COMPLETED if status is None else int(status[row])).name.lower()
