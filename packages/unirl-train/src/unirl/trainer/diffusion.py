"""The trainer of diffusion models: requests with pinned sigmas and noise, pictures to look at."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from unirl.distributed.runtime import Held
from unirl.tracking.media import Mark, before_after, grid, marks
from unirl.tracking.video import write_video
from unirl.trainer.base import Trainer
from unirl.trainer.evaluation import NUM_VIDEOS, EvaluationResult, scores_of, take_images, take_prompts, take_videos
from unirl.trainer.request import build_request, shortened
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams

FIRST_IMAGES = "eval-000000.safetensors"
"""The images from before training, kept so that a resumed run can still show them side by side."""
NUM_PICTURES = 16


class DiffusionTrainer(Trainer[DiffusionSamplingParams]):
    """`Trainer` of images and videos."""

    def prepare(self) -> None:
        """Tell the engine every prompt of the run, so that it may encode them and drop its text encoders."""
        prompts = [row.prompt for row in self._data.rows]
        params = [self._sampling.resolved(0)]
        if self._evaluator is not None:
            prompts += self._evaluator.prompts
            params += self._evaluator.all_params
        self._engine.prepare_prompts(prompts, params)

    def request(self, rollout_id: int, num_prompts: int) -> RolloutReq:
        """The next prompts of the data as a request, with everything pinned."""
        params = self._sampling.resolved(rollout_id)
        plan = self._engine.plan(params)
        params, sigmas = shortened(params, plan.sigmas)
        return build_request(
            self._data.next(num_prompts),
            params,
            sigmas=sigmas,
            latent_shape=plan.latent_shape,
            rollout_id=rollout_id,
        )

    def show_rollout(self, resp: Held, track: str, step: int) -> None:
        """A grid of the first samples with their scores, to the run directory and the trackers."""
        images = torch.cat(resp.map(take_images, track, NUM_PICTURES))[:NUM_PICTURES]
        if images.numel():
            labels = [prompt for part in resp.map(take_prompts, track, NUM_PICTURES) for prompt in part][: len(images)]
            marked = marks(scores_of(resp.meta.track(track), len(images)), self._settings.best_metric)
            self._show("rollout", grid(images, labels, marked=marked), labels, marked, step)
            taken = resp.map(take_videos, track, NUM_VIDEOS)
            self._play("rollout", [video for videos, _ in taken for video in videos], taken[0][1], labels, marked, step)

    def show_evaluation(self, result: EvaluationResult, step: int) -> None:
        """A grid, and the images of the first evaluation beside those of this one."""
        if result.images is None or not result.images.numel():
            return
        metric = self._settings.best_metric
        marked = marks(result.scores, metric)
        self._show("eval", grid(result.images, result.labels, marked=marked), result.labels, marked, step)
        self._play("eval", result.videos, result.fps, result.labels, marked, step)
        first = self._samples() / FIRST_IMAGES
        if step == 0:
            save_file({"images": result.images}, first, metadata={"scores": json.dumps(result.scores)})
        elif first.is_file():
            with safe_open(first, framework="pt") as file:
                before, known = file.get_tensor("images"), (file.metadata() or {}).get("scores")
            both = None if known is None else (marks(json.loads(known), metric), marked)
            if before.shape == result.images.shape:
                picture = before_after(before, result.images, result.labels, marked=both)
                picture.save(self._samples() / "before_after.png")

    def _show(self, name: str, picture: Image.Image, labels: list[str], marked: list[Mark], step: int) -> None:
        picture.save(self._samples() / f"{name}-{step:06d}.png")
        captions = [f"{label}: {mark[0]}" for label, mark in zip(labels, marked, strict=True)]
        for tracker in self._trackers:
            tracker.image(name, picture, step, captions)

    def _play(
        self, name: str, videos: list[Tensor], fps: float | None, labels: list[str], marked: list[Mark], step: int
    ) -> None:
        """The first videos as files beside their grid, to the trackers too; nothing where images are made."""
        files = [
            write_video(self._samples(), f"{name}-{step:06d}-{place}", video, fps)
            for place, video in enumerate(videos[:NUM_VIDEOS])
        ]
        if files:
            captions = [f"{label}: {mark[0]}" for label, mark in zip(labels, marked, strict=True)][: len(files)]
            for tracker in self._trackers:
                tracker.video(name, files, step, captions)

    def _samples(self) -> Path:
        folder = self._run_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
