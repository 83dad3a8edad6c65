"""Images and videos: requests with pinned sigmas and noise, pictures to look at."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from unirl.data.data_source import MultimodalRLDataSource, PromptRow
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.tracking.media import Mark, before_after, grid, marks
from unirl.tracking.video import write_video
from unirl.trainer.held_out import BaseEvaluator, EvaluationResult
from unirl.trainer.modality import Gallery, Modality
from unirl.trainer.request import build_request, inputs_of, shortened
from unirl.trainer.roles import DiffusionEngineRole
from unirl.trainer.samples import NUM_VIDEOS, scores_of, take_images, take_pictures, take_prompts, take_videos
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams

FIRST_IMAGES = "eval-000000.safetensors"
"""The images from before training, kept so that a resumed run can still show them side by side."""
NUM_PICTURES = 16
ROWS_AHEAD = 32
"""Prompts whose pictures are in memory at once while they are encoded ahead."""


class DiffusionModality(Modality[DiffusionSamplingParams]):
    """Images and videos from diffusion models."""

    def prepare(
        self,
        runtime: Runtime,
        data: MultimodalRLDataSource,
        sampling: DiffusionSamplingParams,
        evaluator: BaseEvaluator | None,
    ) -> None:
        """Give every prompt of the run with its pictures to an engine that encodes them first, to drop its encoders."""
        engine = runtime.role("engine", DiffusionEngineRole)
        if not engine.encodes_ahead():
            return
        asked = [(sampling.resolved(0), data.rows)]
        if evaluator is not None:
            asked += [(params, evaluator.rows) for params in evaluator.all_params]
        for params, rows in asked:
            distinct = list({(row.prompt, row.media): row for row in rows}.values())
            for start in range(0, len(distinct), ROWS_AHEAD):
                engine.encode_ahead(inputs_of(distinct[start : start + ROWS_AHEAD]), params)
        engine.drop_text_encoders()

    def request(
        self, runtime: Runtime, rows: Sequence[PromptRow], sampling: DiffusionSamplingParams, rollout_id: int
    ) -> RolloutReq:
        """A request with the stochastic steps of this rollout, pinned sigmas and the ids of every noise."""
        params = sampling.resolved(rollout_id)
        plan = runtime.role("engine", DiffusionEngineRole).plan(params)
        params, sigmas = shortened(params, plan.sigmas)
        return build_request(rows, params, sigmas=sigmas, latent_shape=plan.latent_shape, rollout_id=rollout_id)

    def show_rollout(self, resp: Held, track: str, step: int, gallery: Gallery) -> None:
        """A grid of the first samples with their scores, to the run directory and the trackers."""
        images = torch.cat(resp.map(take_images, track, NUM_PICTURES))[:NUM_PICTURES]
        if images.numel():
            labels = [prompt for part in resp.map(take_prompts, track, NUM_PICTURES) for prompt in part][: len(images)]
            marked = marks(scores_of(resp.meta.track(track), len(images)), gallery.metric)
            given = [each for part in resp.map(take_pictures, track, NUM_PICTURES) for each in part][: len(images)]
            _show("rollout", grid(images, labels, marked=marked, given=given), labels, marked, step, gallery)
            taken = resp.map(take_videos, track, NUM_VIDEOS)
            videos = [video for part, _ in taken for video in part]
            _play("rollout", videos, taken[0][1], labels, marked, step, gallery)

    def show_evaluation(self, result: EvaluationResult, step: int, gallery: Gallery) -> None:
        """A grid, and the images of the first evaluation beside those of this one."""
        if result.images is None or not result.images.numel():
            return
        marked = marks(result.scores, gallery.metric)
        picture = grid(result.images, result.labels, marked=marked, given=result.pictures)
        _show("eval", picture, result.labels, marked, step, gallery)
        _play("eval", result.videos, result.fps, result.labels, marked, step, gallery)
        first = gallery.folder / FIRST_IMAGES
        if step == 0:
            save_file({"images": result.images}, first, metadata={"scores": json.dumps(result.scores)})
        elif first.is_file():
            with safe_open(first, framework="pt") as file:
                before, known = file.get_tensor("images"), (file.metadata() or {}).get("scores")
            both = None if known is None else (marks(json.loads(known), gallery.metric), marked)
            if before.shape == result.images.shape:
                picture = before_after(before, result.images, result.labels, marked=both, given=result.pictures)
                picture.save(gallery.folder / "before_after.png")


def _show(name: str, picture: Image.Image, labels: list[str], marked: list[Mark], step: int, gallery: Gallery) -> None:
    picture.save(gallery.folder / f"{name}-{step:06d}.png")
    captions = [f"{label}: {mark[0]}" for label, mark in zip(labels, marked, strict=True)]
    for tracker in gallery.trackers:
        tracker.image(name, picture, step, captions)


def _play(
    name: str,
    videos: list[Tensor],
    fps: float | None,
    labels: list[str],
    marked: list[Mark],
    step: int,
    gallery: Gallery,
) -> None:
    """The first videos as files beside their grid, to the trackers too; nothing where images are made."""
    files = [
        write_video(gallery.folder, f"{name}-{step:06d}-{place}", video, fps)
        for place, video in enumerate(videos[:NUM_VIDEOS])
    ]
    if files:
        captions = [f"{label}: {mark[0]}" for label, mark in zip(labels, marked, strict=True)][: len(files)]
        for tracker in gallery.trackers:
            tracker.video(name, files, step, captions)
