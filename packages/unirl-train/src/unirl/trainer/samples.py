"""Samples of a response as people see them: media, what they were made from, and their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.tracking.video import STRIP_FRAMES, strip
from unirl.types.errors import ContractError
from unirl.types.media import ImageLists, Images, SizedImages, Texts, Videos, pixel_bytes, pixel_floats
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import SizedLatents

NUM_VIDEOS = 4
"""Videos that a run shows whole at a time."""


def take_images(resp: RolloutResp, track: str, count: int) -> Tensor:
    """The first decoded images of a response [<= count, 3, H, W] (runs where the response lies): of videos a strip of
    frames each, of images of different sizes each as large as it fits into the recipe's size. Empty where the engine
    decodes nothing. Raises ContractError for other media."""
    decoded = resp.tracks[track].decoded
    match decoded:
        case None:
            return torch.empty(0)
        case Images():
            return pixel_floats(decoded.pixels[:count]).cpu().contiguous()
        case SizedImages():
            segment = resp.tracks[track].segment
            params = segment.params if isinstance(segment, SizedLatents) else None
            if params is None:
                raise ContractError(f"track {track!r} does not say how its images were sampled, nor their size")
            return torch.stack([fitted(image, params.height, params.width) for image in decoded.images[:count]])
        case Videos():
            videos = _first_videos(decoded, count)
            num_frames = min(STRIP_FRAMES, max(map(len, videos), default=STRIP_FRAMES))
            return torch.stack([strip(pixel_floats(frames).cpu(), num_frames) for frames in videos])
        case other:
            raise ContractError(f"track {track!r} holds {type(other).__name__}, which a grid of images cannot show")


def fitted(image: Tensor, height: int, width: int) -> Tensor:
    """An image [3, H, W] as large as it fits into `height` x `width`, in the middle of white: float32 in [0, 1]."""
    scale = min(height / image.shape[1], width / image.shape[2])
    size = max(1, round(image.shape[1] * scale)), max(1, round(image.shape[2] * scale))
    small = torch.nn.functional.interpolate(
        pixel_floats(image).cpu().float()[None], size, mode="bilinear", antialias=True, align_corners=False
    )[0]
    sheet = torch.ones(3, height, width)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    sheet[:, top : top + size[0], left : left + size[1]] = small.clamp(0, 1)
    return sheet


def take_videos(resp: RolloutResp, track: str, count: int) -> tuple[list[Tensor], float | None]:
    """The first decoded videos of a response, uint8 [F, 3, H, W] each, and their frames per second; none of images
    (runs where the response lies)."""
    decoded = resp.tracks[track].decoded
    if not isinstance(decoded, Videos):
        return [], None
    videos = [pixel_bytes(video).cpu() for video in _first_videos(decoded, count)]
    return videos, decoded.fps


def _first_videos(decoded: Videos, count: int) -> list[Tensor]:
    return decoded.slice(0, min(count, decoded.batch_size)).unpack("frames")


def take_prompts(resp: RolloutResp, track: str, count: int) -> list[str]:
    """The prompts of the first samples, empty ones where there are no texts (runs where the response lies)."""
    own = resp.with_inputs(track)
    texts = own.primitives.get("text")
    return (texts.texts if isinstance(texts, Texts) else [""] * own.batch_size)[:count]


def take_pictures(resp: RolloutResp, track: str, count: int) -> list[list[Tensor]]:
    """The pictures that the prompt of each of the first samples shows, none for a text alone (runs where the response
    lies)."""
    own = resp.with_inputs(track)
    pictures = own.primitives.get("image")
    images = pictures.images if isinstance(pictures, ImageLists) else [[]] * own.batch_size
    return [list(each) for each in images[:count]]


def take_drawn(resp: RolloutResp, track: str, count: int) -> list[str]:
    """What the first samples of a track that grew from texts were drawn from, a thought or a prompt; none of a root
    (runs where the response lies)."""
    own = resp.track(track)
    texts = own.primitives.get("thought", own.primitives.get("text"))
    return texts.texts[:count] if own.parent_track is not None and isinstance(texts, Texts) else []


def sample_values(track: RolloutTrack, sample: int) -> dict[str, float]:
    """The reward and each component of one sample of a scored track."""
    columns = {"reward": track.scored_rewards, **track.component_rewards}
    return {name: float(values[sample]) for name, values in columns.items()}


def scores_of(track: RolloutTrack, count: int) -> list[dict[str, float] | None]:
    """The values of the first samples; None for one that could not be scored."""
    return [sample_values(track, i) if track.reward_errors[i] is None else None for i in range(count)]
