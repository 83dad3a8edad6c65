"""Texts and images of them: requests for two stages, pictures with what was asked for and what was drawn."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from unirl.data.data_source import MultimodalRLDataSource, PromptRow
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.tracking.media import Mark, before_after, grid, marks
from unirl.trainer.diffusion import FIRST_IMAGES, NUM_PICTURES
from unirl.trainer.held_out import BaseEvaluator, EvaluationResult
from unirl.trainer.modality import Gallery, Modality
from unirl.trainer.request import build_composed_request, shortened
from unirl.trainer.roles import DiffusionEngineRole
from unirl.trainer.samples import scores_of, take_drawn, take_images, take_prompts
from unirl.trainer.text import refuse_long_prompts
from unirl.types.errors import ContractError
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ComposedSamplingParams


class ComposedModality(Modality[ComposedSamplingParams]):
    """A text of each prompt, and images of the text."""

    trains_tokens: ClassVar[bool] = True

    def prepare(
        self,
        runtime: Runtime,
        data: MultimodalRLDataSource,
        sampling: ComposedSamplingParams,
        evaluator: BaseEvaluator | None,
    ) -> None:
        """Let the writer look at every prompt, so that none that is too long stops the run later.

        Raises ConfigError naming the file.
        """
        refuse_long_prompts(runtime, data, sampling.ar)

    def request(
        self, runtime: Runtime, rows: Sequence[PromptRow], sampling: ComposedSamplingParams, rollout_id: int
    ) -> RolloutReq:
        """A request for texts and images, with the painter's stochastic steps and sigmas pinned."""
        resolved = sampling.diffusion.resolved(rollout_id)
        plan = runtime.role("engine", DiffusionEngineRole).plan(resolved)
        resolved, sigmas = shortened(resolved, plan.sigmas)
        params = dataclasses.replace(sampling, diffusion=resolved)
        return build_composed_request(
            rows, params, sigmas=sigmas, latent_shape=plan.latent_shape, rollout_id=rollout_id
        )

    def show_rollout(self, resp: Held, track: str, step: int, gallery: Gallery) -> None:
        """A grid of the first images with their prompts, what was drawn and the scores."""
        name = child_of(resp, track)
        images = torch.cat(resp.map(take_images, name, NUM_PICTURES))[:NUM_PICTURES]
        if not images.numel():
            return
        asked, drawn = (
            [each for part in resp.map(take, name, NUM_PICTURES) for each in part][: len(images)]
            for take in (take_prompts, take_drawn)
        )
        scored = marks(scores_of(resp.meta.track(name), len(images)), gallery.metric)
        _show("rollout", images, asked, _said(drawn, scored), step, gallery)

    def show_evaluation(self, result: EvaluationResult, step: int, gallery: Gallery) -> None:
        """A grid, and the images of the first evaluation beside those of this one: prompt, text and image before and
        after."""
        if result.images is None or not result.images.numel():
            return
        said = _said(result.drawn, marks(result.scores, gallery.metric))
        _show("eval", result.images, result.labels, said, step, gallery)
        first = gallery.folder / FIRST_IMAGES
        if step == 0:
            save_file({"images": result.images}, first, metadata={"said": json.dumps(said)})
        elif first.is_file():
            before, said_before = _first(first)
            if before.shape == result.images.shape:
                picture = before_after(before, result.images, result.labels, marked=(said_before, said))
                picture.save(gallery.folder / "before_after.png")


def child_of(resp: Held, root: str) -> str:
    """The track that grew from the root. Raises ContractError where there is none."""
    for name, track in resp.meta.tracks.items():
        if track.parent_track == root:
            return name
    raise ContractError(f"no track grew from {root!r}; this response has {list(resp.meta.tracks)}")


def _said(drawn: Sequence[str], marked: Sequence[Mark]) -> list[Mark]:
    """What was drawn, and how that was judged."""
    return [(f"{text}: {words}", passes) for text, (words, passes) in zip(drawn, marked, strict=True)]


def _show(name: str, images: Tensor, asked: list[str], said: list[Mark], step: int, gallery: Gallery) -> None:
    picture: Image.Image = grid(images, asked, marked=said)
    picture.save(gallery.folder / f"{name}-{step:06d}.png")
    captions = [f"{label}: {mark[0]}" for label, mark in zip(asked, said, strict=True)]
    for tracker in gallery.trackers:
        tracker.image(name, picture, step, captions)


def _first(path: Path) -> tuple[Tensor, list[Mark]]:
    """Images of the first evaluation and what was said of them."""
    with safe_open(path, framework="pt") as file:
        images, known = file.get_tensor("images"), (file.metadata() or {}).get("said", "[]")
    return images, [(str(words), passes) for words, passes in json.loads(known)]
