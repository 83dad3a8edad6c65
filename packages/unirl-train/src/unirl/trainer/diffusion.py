"""The trainer of diffusion models: requests with pinned sigmas and noise, pictures to look at."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file, save_file

from unirl.distributed.runtime import Held
from unirl.tracking.media import before_after, grid
from unirl.trainer.base import Trainer
from unirl.trainer.evaluation import EvaluationResult, take_images
from unirl.trainer.request import build_request, shortened
from unirl.types.media import Texts
from unirl.types.reward import RewardResponse
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

    def show_rollout(
        self, resp: Held, req: RolloutReq, reply: RewardResponse, advantages: torch.Tensor, step: int
    ) -> None:
        """A grid of the first samples, to the trackers."""
        images = torch.cat(resp.map(take_images, "image", NUM_PICTURES))[:NUM_PICTURES]
        if images.numel():
            texts = req.primitives["text"]
            labels = texts.texts[: len(images)] if isinstance(texts, Texts) else None
            self._show("rollout", grid(images, labels), step)

    def show_evaluation(self, result: EvaluationResult, step: int) -> None:
        """A grid, and the images of the first evaluation beside those of this one."""
        folder = self._run_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        if result.images is None or not result.images.numel():
            return
        picture = grid(result.images, result.labels)
        picture.save(folder / f"eval-{step:06d}.png")
        self._show("eval", picture, step)
        first = folder / FIRST_IMAGES
        if step == 0:
            save_file({"images": result.images}, first)
        elif first.is_file():
            before = load_file(first)["images"]
            if before.shape == result.images.shape:
                before_after(before, result.images, result.labels).save(folder / "before_after.png")

    def _show(self, name: str, picture: Any, step: int) -> None:  # Any: a PIL image
        for tracker in self._trackers:
            tracker.image(name, picture, step)
