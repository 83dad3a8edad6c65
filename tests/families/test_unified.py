"""A unified model thinks, then draws, and learns from both in one optimizer step."""

from __future__ import annotations

import dataclasses
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_steps import ALGORITHMS, take_two_steps
from torch import Tensor
from unified_steps import DRAWING, WEIGHTS, Unified, gradients_of_ranks, rollout, tiny_bagel, unified

from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.pipeline import BagelPipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.train.track_loss import TrackLoss
from unirl.types.media import Images, Primitive
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

ranks_of_train: Any = importlib.import_module("ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bagel.save_bagel(tmp_path_factory.mktemp("unified") / "bagel")


@pytest.fixture(scope="module")
def made(folder: Path) -> Unified:
    """Its backend remembers gradients and takes no step, so tests may share it."""
    return unified(folder)


@pytest.fixture(scope="module")
def tracks(made: Unified) -> dict[str, RolloutTrack]:
    return rollout(made.writer, made.painter)


def _gradients(made: Unified, track: RolloutTrack, name: str) -> dict[str, Tensor]:
    made.stack([name]).train(RolloutResp(tracks={name: track.replace(parent_track=None)}), progress=0.0)
    return made.backend.found


def test_one_step_learns_from_thoughts_and_from_images(made: Unified, tracks: dict[str, RolloutTrack]) -> None:
    """The gradient is the weighted sum of the tracks' own, each measured; at unchanged weights every ratio is 1."""
    assert tracks["text"].batch_size == 4 and tracks["image"].batch_size == 8
    result = made.stack(["text", "image"], measures_balance=True).train(RolloutResp(tracks=tracks), progress=0.0)
    joint, metrics = made.backend.found, result.metrics
    # A forward of the replay has both steps of four samples, one of the rollout a step of them: float32's rounding.
    assert metrics["image/policy/first_ratio_max_abs_dev"] < 1e-6
    assert metrics["text/policy/first_ratio_max_abs_dev"] == 0
    single = {name: _gradients(made, track, name) for name, track in tracks.items()}
    # Thoughts are words; images train both experts, the text expert through what it makes of the context.
    assert all("_moe_gen" not in name for name in single["text"])
    assert {"embed_tokens" in name for name in single["image"]} == {"_moe_gen" in name for name in single["image"]}
    assert single["image"].keys() | single["text"].keys() == joint.keys()
    zero = torch.zeros(())
    weighted = {
        track: {name: weight * single[track].get(name, zero) for name in joint} for track, weight in WEIGHTS.items()
    }
    for name, gradient in joint.items():
        expected = weighted["text"][name] + weighted["image"][name]
        # float32 sums in another order; how they round depends on the number of threads.
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    flat = {
        track: torch.cat([each[name].expand_as(joint[name]).flatten() for name in joint]).double()
        for track, each in weighted.items()
    }
    for track in WEIGHTS:
        assert metrics[f"{track}/train/grad_norm"] == pytest.approx(float(flat[track].norm()), rel=1e-4)
    cosine = float(torch.nn.functional.cosine_similarity(flat["text"], flat["image"], dim=0))
    assert metrics["train/grad_cosine/text_image"] == pytest.approx(cosine, abs=1e-4)


def test_both_tracks_are_replayed_bit_for_bit(made: Unified) -> None:
    """Where a forward of the replay has the rows of one of the rollout."""
    one_step = rollout(made.writer, made.painter, dataclasses.replace(DRAWING, sde_indices=[1]))
    metrics = made.stack(["text", "image"]).train(RolloutResp(tracks=one_step), progress=0.0).metrics
    assert metrics["image/policy/first_ratio_max_abs_dev"] == 0
    assert metrics["text/policy/first_ratio_max_abs_dev"] == 0


def test_tracks_take_turns(made: Unified, tracks: dict[str, RolloutTrack]) -> None:
    """Alternating updates: in each one track alone trains."""
    made.stack(["text"])
    algorithms = {name: made.algorithm(name) for name in tracks}
    losses = {"text": TrackLoss(every=2), "image": TrackLoss(every=2, turn=1)}
    stack = type(made.stack(["text"]))(made.backend, algorithms, micro_batch_size=4, losses=losses)
    found = []
    for _ in range(2):
        stack.train(RolloutResp(tracks=tracks), progress=0.0)
        found.append(made.backend.found)
    for gradients, (name, track) in zip(found, tracks.items(), strict=True):
        expected = _gradients(made, track, name)
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[key], expected[key]) for key in expected)


class Editing:
    """How a request of images to edit is sampled, as the families of the table say it."""

    def sampling(self, **changes: Any) -> DiffusionSamplingParams:
        """Guided by prompt and image."""
        return dataclasses.replace(DRAWING, sde_indices=None, sampler_kwargs={"guidance_scale_image": 2.0}, **changes)

    def inputs(self, num_samples: int) -> dict[str, Primitive]:
        """One image each."""
        generator = torch.Generator().manual_seed(5)
        return {"image": Images(pixels=torch.rand(num_samples, 3, 32, 48, generator=generator))}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_an_algorithm_takes_two_steps_on_pictures_to_edit(method: str, folder: Path) -> None:
    bundle = BagelBundle(str(folder))
    painter = BagelPipeline(bundle, FlowSDEStrategy(), reference_sides=(32, 64))
    bagel = bundle.bagel
    take_two_steps(Editing(), painter, [bagel.vit_model, bagel.connector, bagel.vae2llm, bundle.vae], method)


@pytest.mark.slow
@pytest.mark.matrix
def test_two_ranks_differentiate_as_one(folder: Path, tmp_path: Path) -> None:
    """Both tracks, sharded: gradients and balance are those of one process."""
    one = gradients_of_ranks(folder)
    for rank in ranks_of_train.results_of_ranks(partial(gradients_of_ranks, folder), tmp_path):
        assert rank["gradients"].keys() == one["gradients"].keys()
        for name, gradient in one["gradients"].items():
            # float32 sums of the same rows in another order.
            scale = float(gradient.abs().max())
            torch.testing.assert_close(rank["gradients"][name], gradient, rtol=1e-4, atol=1e-5 * scale + 1e-9)
        assert rank["balance"] == pytest.approx(one["balance"], rel=1e-4)
        assert "train/grad_cosine/text_image" in one["balance"]
